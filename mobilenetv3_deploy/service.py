"""The service: a Ray Serve application that says what uploaded images show.

One deployment reads and refuses requests, decodes images and runs the models in batches: between two, each upload and
each answer would go through Ray once more. Ray's own configuration puts as many replicas as wanted on as many machines.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.resources import files
from typing import Any, cast

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from ray import serve

from mobilenetv3_common.images import decode_image, decoding_work
from mobilenetv3_common.predictions import top_classes
from mobilenetv3_deploy.predict import Predictor
from mobilenetv3_deploy.preprocessing import preprocess
from mobilenetv3_deploy.uploads import CLOSE, UploadLimits, read_upload
from sturdyio.cli import UserError

LANGUAGES = ("en", "zh")
NAME = "the upload"  # in messages
RETRY_AFTER = 1  # seconds
TOPK = 5
SCANS = 10  # of a progressive JPEG in colour, as libjpeg writes it
PAGE_HEADERS = {
    # Nothing but the page itself, which may ask this service and show pictures of the user's own.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept-Language",
}


class ServiceOptions(UploadLimits):
    """The flags of tools/serve.py, and the args of a Serve YAML."""

    model_config = ConfigDict(extra="forbid")
    model: str  # a folder that tools/export_model.py wrote, on every machine that runs a replica
    reference: str | None = None
    engine: str = "best"
    threads: PositiveInt = 1
    max_batch: PositiveInt = 32  # images
    max_queue: PositiveInt = 128  # images that wait, beyond the batch in work
    # Of an image; decoding takes up to 16 bytes a pixel. An image, and all together that wait, may have SCANS times as
    # many pixels to be decoded, each scan of a JPEG counted.
    max_megapixels: PositiveFloat = 50


def load_models(options: ServiceOptions) -> dict[str, Predictor]:
    """{"port": ..., "reference": ... if there is one}; raises UserError where one cannot be loaded or they differ."""
    folders = {"port": options.model, "reference": options.reference}
    models = {role: Predictor(folder, options.engine, options.threads) for role, folder in folders.items() if folder}
    if len({model.card.preprocessing for model in models.values()}) > 1:
        raise UserError(
            f"model {options.reference} has another preprocessing than {options.model}: export both for the same sizes"
        )
    return models


def too_many() -> HTTPException:
    return HTTPException(429, "too many images are waiting: send it again later", {"Retry-After": str(RETRY_AFTER)})


def refuse(what: str) -> None:
    """Instead of an answer for an image of which `what` says that little would be left."""
    raise UserError(f"{what}; send it with 8 bits")


def preferred_language(accept: str) -> str:
    """One of LANGUAGES, by an Accept-Language header (RFC 9110, 12.5.4)."""
    best, language = 0.0, LANGUAGES[0]
    for entry in accept.split(","):
        tag, _, parameter = entry.partition(";")
        try:
            weight = float(parameter.strip().removeprefix("q=") or 1)
        except ValueError:
            weight = 0.0
        if tag.strip()[:2].lower() in LANGUAGES and weight > best:
            best, language = weight, tag.strip()[:2].lower()
    return language


# Ray keeps the routes as they are when the class below is defined: what they call stands above it. FastAPI's own pages
# load scripts of others.
api = FastAPI(title="MobileNetV3", docs_url=None, redoc_url=None, openapi_url=None)


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=1000)
@serve.ingress(api)
class Service:
    """GET / and /health, POST /predict: the port's and, if it is given, the reference's exported model."""

    def __init__(self, options: ServiceOptions) -> None:
        self.limits = options
        self.most_pixels = int(options.max_megapixels * 1e6)
        self.most_work = SCANS * self.most_pixels
        self.most_queued = options.max_batch + options.max_queue  # those in work are in the queue until they are done
        self.predictors = load_models(options)
        self.preprocessing = self.predictors["port"].card.preprocessing
        self.page = (files("mobilenetv3_deploy") / "service_page.html").read_text(encoding="utf-8")
        self.draining = False
        self.accepted = 0  # requests that are in work
        self.queued = 0  # of these, the ones that have come to their end
        self.work = 0  # pixels times scans of these
        self.reader = ThreadPoolExecutor(1)  # of headers
        self.worker = ThreadPoolExecutor(1)  # one batch at a time; each thread more would keep memory of its own
        cast(Any, self._batch).set_max_batch_size(options.max_batch)  # serve.batch adds it

    @api.get("/", response_class=HTMLResponse)
    async def show_page(self, request: Request, lang: str = "") -> HTMLResponse:
        language = lang if lang in LANGUAGES else preferred_language(request.headers.get("accept-language", ""))
        text = self.page.replace('<html lang="en">', f'<html lang="{language}">', 1)
        return HTMLResponse(text, headers=PAGE_HEADERS)

    @api.get("/health")
    async def health(self) -> dict[str, str]:
        self.refuse_when_draining()
        return {"status": "ok"}

    @api.post("/predict")
    async def predict(self, request: Request) -> dict[str, Any]:
        self.refuse_when_draining()
        self.accepted += 1
        try:
            answer = await self.answer(await read_upload(request, self.limits))
        finally:
            self.accepted -= 1
        if "error" in answer:
            raise HTTPException(422, answer["error"])
        return answer

    async def answer(self, upload: bytes) -> dict[str, Any]:
        """The answer's JSON, or {"error": why the upload cannot be decoded}."""
        if self.queued >= self.most_queued:
            raise too_many()
        self.queued += 1
        try:
            loop = asyncio.get_running_loop()
            work = await loop.run_in_executor(self.reader, decoding_work, upload, NAME, self.most_pixels)
        except UserError as error:
            return {"error": str(error)}
        else:
            return await self.answer_in_turn(upload, work)
        finally:
            self.queued -= 1

    async def answer_in_turn(self, upload: bytes, work: int) -> dict[str, Any]:
        """`answer` of an upload that takes so much work."""
        if work > self.most_work:
            return {"error": f"{NAME} takes more work than {self.most_work} pixels: send it with fewer scans"}
        if self.work + work > self.most_work:
            raise too_many()
        self.work += work
        try:
            return await self._batch(upload)
        finally:
            self.work -= work

    @serve.batch(batch_wait_timeout_s=0)  # a batch is what has come while the one before was in work
    async def _batch(self, uploads: list[bytes]) -> list[dict[str, Any]]:
        return await asyncio.get_running_loop().run_in_executor(self.worker, self.classify, uploads)

    def refuse_when_draining(self) -> None:
        if self.draining:
            raise HTTPException(503, "the service is being stopped: send it elsewhere", CLOSE)

    async def drain(self) -> int:
        """Accept nothing more from now on; returns how many requests are in work still."""
        self.draining = True
        return self.accepted

    def classify(self, uploads: list[bytes]) -> list[dict[str, Any]]:
        """An answer for each of `uploads`; images are decoded one at a time."""
        answers: list[dict[str, Any]] = []
        arrays: list[np.ndarray] = []
        for upload in uploads:
            try:
                image = decode_image(upload, NAME, refuse, self.most_pixels)
            except UserError as error:
                answers.append({"error": str(error)})
            else:
                answers.append({})
                arrays.append(preprocess(image, self.preprocessing))
        decoded = [answer for answer in answers if "error" not in answer]
        for role, predictor in self.predictors.items() if arrays else ():
            for answer, row in zip(decoded, predictor.probabilities(np.stack(arrays)), strict=True):
                answer[role] = [asdict(score) for score in top_classes(row, TOPK, predictor.class_names)]
        return answers


def application(options: ServiceOptions) -> serve.Application:
    """What Ray Serve runs, here and as `serve run mobilenetv3_deploy.service:application model=exported/port`."""
    return cast(Any, Service).bind(options)  # a Deployment, by its decorator

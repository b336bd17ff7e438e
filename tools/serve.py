"""Say over HTTP what images show: a service on Ray Serve, with a page for the browser.

  python tools/serve.py --model exported/port --reference exported/ref
  curl -F file=@cat.jpg http://127.0.0.1:8000/predict

POST /predict takes an image as its body or as the file of a form, and answers with the five most probable classes of
the port and of the reference, if one is given: {"port": [{"class_id": 281, "name": "tabby", "probability": 0.9091},
...], "reference": [...]}. GET / is a page on which a picture can be dropped, GET /health says whether the service
takes requests. It refuses with 408 what comes too slowly, 413 what is too large, 415 what is no type of image, 422
what cannot be decoded, has too many pixels or scans, or more than 8 bits a channel, 429 what finds the queue full, and
503 what comes while it is stopped. The queue is full, too, when all images in it have more pixels, times the scans of a
JPEG, than an image of --max-megapixels in 10 scans.
Prometheus metrics are Ray's own, at the port of --metrics-port: ray_serve_num_http_requests_total and others.

SIGTERM or Ctrl-C stops it: what was accepted is answered first. Send the signal to this process alone, not to Ray's
(systemd: KillMode=mixed).

Anyone who can reach the port can use the service: it has no login and no encryption of its own. So it listens on this
machine alone unless --host says otherwise; then put a reverse proxy before it that has both, and that limits how long
the headers of a request may take. Ray Serve's processes speak to each other, in pickles, through ports that they open
on all network interfaces: run this behind a firewall that lets nothing but --port through. Their files are in a folder
that this user alone can read and that is removed at the end; the token that they ask each other for is in no file.

More machines: mobilenetv3_deploy.service:application is the import path of a Serve application, whose args are the
flags below, for `serve run` or `serve deploy` on a Ray cluster.
"""

import argparse
import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, positive_int, run, whole_number

PROG = "serve"
GRACE = 2.0  # seconds between the last answer and the end, for answers to reach their clients and clients to stay away
OBJECT_STORE = 80 * 2**20  # bytes, hardly used; Ray would take 30 % of the memory

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # one machine: Ray's own ports are at 127.0.0.1, too
    "RAY_worker_niceness": "0",  # not 15: what the service answers is waited for
    "RAY_AUTH_MODE": "token",  # asked of who speaks to Ray's own ports
}


def listening_at(port: int) -> dict[str, str]:
    """For Ray: the one replica listens at `port` itself, and answers in the thread that listens.

    Through Ray's proxy and from thread to thread a request costs twice the computing time.
    """
    return {
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(port + 1),  # the first that is not used
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    }


def positive_number(text: str) -> float:
    """An argparse type: a number above 0."""
    if not 0 < float(text) < float("inf"):
        raise ValueError
    return float(text)


positive_number.__name__ = "number above 0"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", metavar="DIR", required=True, default=argparse.SUPPRESS, help="the port's exported model")
    add("--reference", metavar="DIR", help="the reference's exported model, to be shown beside it")
    add("--engine", metavar="NAME", default="best", help="what runs both; best: the fastest that is installed")
    add("--threads", type=positive_int, default=1, metavar="N", help="of the engine")
    add("--host", default="127.0.0.1", help="the address to listen on; 0.0.0.0: every one of this machine")
    add("--port", type=whole_number(1, 65535), default=8000, metavar="N", help="of the service")
    add(
        "--metrics-port",
        type=whole_number(1, 65535),
        default=8080,
        metavar="N",
        help="of GET /metrics, on this machine",
    )
    add("--max-batch", type=positive_int, default=32, metavar="N", help="images that go through the model at once")
    add("--max-queue", type=positive_int, default=128, metavar="N", help="images that wait; more are refused")
    add("--max-megabytes", type=positive_number, default=10.0, metavar="X", help="of an upload")
    add("--max-megapixels", type=positive_number, default=50.0, metavar="X", help="of an image")
    add("--upload-seconds", type=positive_number, default=10.0, metavar="X", help="until an upload must have come")
    return parser


def check_address(host: str, port: int, flags: str) -> None:
    """Raise UserError if nothing can listen there: Ray would say so in a page of text."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        raise UserError(
            f"{flags}: {host}, port {port} cannot be listened on ({error.strerror}): choose another"
        ) from error


def main(args: argparse.Namespace) -> None:
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}  # else Ray leaves one in ~/.ray, for all to read
    os.environ |= RAY | listening_at(args.port) | token  # before Ray is imported
    try:
        from mobilenetv3_deploy import service
    except ImportError as error:
        raise UserError(f"the service needs a package that is missing ({error}): pip install -e '.[serve]'") from error
    chosen = {name: value for name, value in vars(args).items() if name in service.ServiceOptions.model_fields}
    folders = {name: str(Path(chosen[name]).absolute()) for name in ("model", "reference") if chosen[name]}
    options = service.ServiceOptions(**chosen | folders)
    service.load_models(options)  # for their mistakes to be one line here
    check_address(args.host, args.port, "--port")
    check_address("127.0.0.1", args.metrics_port, "--metrics-port")
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # of mode 700; Ray opens its own to all
        serve_until_stopped(args, service.application(options), f"{folder}/ray")


def serve_until_stopped(args: argparse.Namespace, application: Any, folder: str) -> None:
    """Start Ray with its files in `folder`, and the service; return once SIGTERM has come and all is answered."""
    import ray
    from ray import serve

    ray.init(
        address="local",
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        object_store_memory=OBJECT_STORE,
        _metrics_export_port=args.metrics_port,
        _temp_dir=folder,
    )
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        # The port is that of Ray's proxy, which nobody asks: any that is free.
        serve.start(proxy_location="HeadOnly", http_options={"host": args.host, "port": 0})
        handle = serve.run(application, route_prefix="/")
        print(
            f"serving http://{args.host}:{args.port}/, metrics http://127.0.0.1:{args.metrics_port}/metrics", flush=True
        )
        stop.wait()
        while handle.drain.remote().result():
            time.sleep(0.05)
        time.sleep(GRACE)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)

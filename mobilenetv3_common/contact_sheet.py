"""A picture of pictures: images, each with its most probable classes below it."""

import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from mobilenetv3_common.predictions import ClassScore, Prediction
from sturdyio.files import atomic_path

SIDE, LINE, MARGIN = 224, 16, 8  # pixels: of an image, of a line of text, between the cells
MOST_COLUMNS = 5


class ContactSheet:
    """The first `most` images that it is given, made small at once, and their predictions, in the same order."""

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.images: list[Image.Image] = []
        self.predictions: list[Prediction] = []

    def add_image(self, image: Image.Image) -> None:
        """Keep a small copy of `image`; its prediction is added later."""
        if len(self.images) < self.most:
            small = image.copy()
            small.thumbnail((SIDE, SIDE))
            self.images.append(small)

    def add_prediction(self, prediction: Prediction) -> None:
        """Keep what is said of the image whose turn it is."""
        if len(self.predictions) < self.most:
            self.predictions.append(prediction)

    def save(self, path: str | Path) -> None:
        """Write the sheet as PNG."""
        columns = max(1, min(MOST_COLUMNS, math.ceil(math.sqrt(len(self.images)))))
        lines = 1 + max((len(prediction.top) for prediction in self.predictions), default=0)
        width, height = SIDE + MARGIN, SIDE + lines * LINE + 2 * MARGIN
        rows = max(1, math.ceil(len(self.images) / columns))
        sheet = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), "white")
        draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
        for place, (image, prediction) in enumerate(zip(self.images, self.predictions, strict=True)):
            left = MARGIN + place % columns * width
            top = MARGIN + place // columns * height
            sheet.paste(image, (left + (SIDE - image.width) // 2, top + (SIDE - image.height) // 2))
            for number, text in enumerate((Path(prediction.path).name, *map(caption, prediction.top))):
                y = top + SIDE + MARGIN // 2 + number * LINE
                draw.text((left, y), fitting(text, font), "black" if number else "gray", font)
        with atomic_path(path) as temporary:
            sheet.save(temporary, "PNG")


def caption(score: ClassScore) -> str:
    """0.9091 tabby, or the number of the class where it has no name"""
    return f"{score.probability:.4f}  {score.name or score.class_id}"


def fitting(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """`text`, cut so that it fits below its image, with ? for what the font lacks or cannot be encoded."""
    text = text.encode("ascii", "replace").decode()
    while font.getlength(text) > SIDE:
        text = text[:-2] + "~"
    return text

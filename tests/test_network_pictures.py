"""The tutorial's pictures of the network are what a program reads off the reference model, now."""

import re
from itertools import pairwise

import pytest

from maintenance.pages import draw_network
from mobilenetv3_ref.models import MODELS


def main(*flags: str) -> int:
    return draw_network.main(draw_network.get_args_parser().parse_args(flags))


def test_pictures_are_not_stale(capsys):
    assert main("--check") == 0, capsys.readouterr().out


def test_stale_pictures_are_named_and_drawn_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(draw_network, "IMAGES", tmp_path)
    pictures = {f"picture_{i}.svg": f"<svg>{i}</svg>" for i in range(2)}
    monkeypatch.setattr(draw_network, "draw_all", lambda: pictures)
    assert main("--check") == 1
    assert capsys.readouterr().out == "".join(f"stale: docs/images/{name}\n" for name in pictures)
    assert main() == main("--check") == 0
    (tmp_path / "picture_1.svg").write_text("<svg>2</svg>")
    capsys.readouterr()
    assert main("--check") == 1
    assert capsys.readouterr().out == "stale: docs/images/picture_1.svg\n"


ROWS = {
    "mobilenet_v3_small": [
        ("features.2: 16 → 72 → 24", "3×3, stride 2, RE"),
        ("features.5: 40 → 240 → 40", "5×5, SE, HS"),
        ("classifier.3: 1024 → 1000", "linear"),
    ],
    "mobilenet_v3_large": [
        ("features.4: 24 → 72 → 40", "5×5, stride 2, SE, RE"),
        ("features.7: 40 → 240 → 80", "3×3, stride 2, HS"),
        ("classifier.3: 1280 → 1000", "linear"),
    ],
}
PARAMETERS = {"mobilenet_v3_small": "2,542,856", "mobilenet_v3_large": "5,483,032"}


@pytest.mark.parametrize("name", ROWS)
def test_pictures_say_what_the_papers_tables_say(name):
    """Some rows of tables 1 and 2, the resolutions, and the parameters that the model's docstring names."""
    words = re.findall("<text.*?>(.*?)</text>", draw_network.draw_stages(MODELS[name](), name))
    assert set(ROWS[name]) <= set(pairwise(words))
    assert [word for word in words if word.endswith("²")] == ["112²", "56²", "28²", "14²", "7²"]
    assert any(word.startswith(f"{PARAMETERS[name]} parameters, ") for word in words)


def test_picture_of_a_block_follows_its_layers():
    picture = draw_network.draw_block(MODELS["mobilenet_v3_small"](), "features.5", "a block")
    places = [picture.index(f">{layer} → ") for layer in ("block.0.0", "block.1.0", "block.2.fc1", "block.3.1")]
    assert places == sorted(places)
    assert ">depthwise convolution 5×5<" in picture and ">block.2.fc1 → 1²×64<" in picture and ">residual<" in picture


def test_tail_says_what_each_layer_costs():
    picture = draw_network.draw_tail(MODELS["mobilenet_v3_small"](), "the tail")
    assert ">590.8 k<" in picture  # 576 * 1024 weights and 1024 biases of classifier.0
    assert ">589.8 k<" in picture  # and as many multiply-adds as weights, for a single place
    assert ">2.7 M<" in picture  # 49 places, 96 * 576 each

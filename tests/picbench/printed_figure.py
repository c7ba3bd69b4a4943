"""What every figure promises that is made for print."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from picbench.figures.canvas import FORMATS


def check_printed(base: Path) -> str:
    """A column wide, 300 dots an inch, letters of 6 points or more, nothing cut; the SVG."""
    assert all(base.with_name(f"{base.name}.{k}").stat().st_size > 1000 for k in FORMATS)
    with Image.open(f"{base}.png") as image:
        assert image.size[0] == pytest.approx(85 / 25.4 * 300, abs=2)
        assert _is_blank_at_the_frame(image), f"{base.name}: something is cut"
    text = Path(f"{base}.svg").read_text(encoding="utf-8")
    # Points: the SVG's units, of which its width has 85 mm.
    width = ElementTree.fromstring(text).get("width", "")
    assert float(width.removesuffix("pt")) == pytest.approx(85 / 25.4 * 72, abs=0.5)
    assert min(float(size) for size in re.findall(r"font-size: ([\d.]+)px", text)) >= 6
    return text


def _is_blank_at_the_frame(image: Image.Image) -> bool:
    width, height = image.size
    inside = image.convert("L")
    inside.paste(255, (1, 1, width - 1, height - 1))
    return inside.getextrema() == (255, 255)

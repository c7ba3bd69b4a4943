"""HTML and SVG elements whose text and attributes are always escaped."""

from markupsafe import Markup, escape


def element(name: str, *children: str, **attributes: str | float | None) -> Markup:
    """An element; children that are not `Markup` are escaped, attributes that are None left out.

    ``class_`` is the attribute class, ``stroke_width`` is stroke-width; numbers have two digits
    after the point at most.
    """
    given = (
        f'{key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(children)
    return Markup(f"<{' '.join([name, *given])}>{inner}</{name}>")


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")

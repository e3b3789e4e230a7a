"""Image and patch sizes: one number for a square, or (height, width)."""

Size = int | tuple[int, int]
"""A side for a square, or (height, width)."""


def pair(size: Size) -> tuple[int, int]:
    """Return a size as (height, width).

    >>> pair(224), pair((224, 320))
    ((224, 224), (224, 320))
    """
    return (size, size) if isinstance(size, int) else size


def format_size(size: Size) -> str:
    """Format a size as height×width.

    >>> format_size(224), format_size((224, 320))
    ('224×224', '224×320')
    """
    return "{}×{}".format(*pair(size))

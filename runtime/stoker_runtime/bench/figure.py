"""Where the benchmarks' plots are drawn.

Knows nothing of what is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_runtime.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of `width` by `height` inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--plot needs matplotlib; install it with: pip install 'stoker[bench]'", param="plot"
        ) from error
    return Figure(figsize=(width, height))

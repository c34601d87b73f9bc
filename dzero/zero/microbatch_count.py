"""The microbatches of a step, counted, so that a loop which forgets one is told instead of trained wrongly."""

from __future__ import annotations

from dzero.zero.layout import Layout


class MicrobatchCount:
    """Those since the last optimizer step."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._made, self._ended = 0, False

    def begin(self, is_last: bool) -> None:
        """One more; `is_last`: of its step."""
        self._made, self._ended = self._made + 1, is_last

    def add_last(self) -> None:
        """A backward outside of `microbatch` was the last one of a step whose others were inside."""
        if self._made and not self._ended:
            self.begin(is_last=True)

    def abandon(self) -> None:
        """They are not to count."""
        self._made, self._ended = 0, False

    def end(self) -> None:
        """The optimizer steps. Raises RuntimeError for microbatches that the layout was not made for."""
        made, ended, self._made, self._ended = self._made, self._ended, 0, False
        if made and not ended:
            raise RuntimeError(
                f"step() after {made} microbatches of which none was the last: run the last backward of a step under "
                "microbatch(is_last=True), or outside of microbatch()"
            )
        if made > 1 and self._layout.microbatches == 1:
            raise RuntimeError(
                f"{made} microbatches in this step, but the model was laid out for one: pass microbatches={made} to "
                "shard(), which decides where and in which dtype gradients accumulate"
            )

"""Count of a step's microbatches, which detects a loop that omits one before it trains wrongly."""

from __future__ import annotations

from dzero.zero.layout import Layout


class MicrobatchCount:
    """Counter of the microbatches since the last optimizer step."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._made, self._ended = 0, False

    @property
    def has_begun(self) -> bool:
        """Whether microbatches were counted since the last step."""
        return self._made > 0

    @property
    def is_open(self) -> bool:
        """Whether microbatches were counted, of which none was the last."""
        return self._made > 0 and not self._ended

    def begin(self, is_last: bool) -> None:
        """Count a microbatch, and record whether it is the last of its step."""
        self._made, self._ended = self._made + 1, is_last

    def add_last(self) -> None:
        """Count a backward outside of `microbatch` as the last one, if the step's other ones were inside."""
        if self.is_open:
            self.begin(is_last=True)

    def abandon(self) -> None:
        """Discard the counted microbatches."""
        self._made, self._ended = 0, False

    def end(self) -> None:
        """Reset the count at an optimizer step; raise RuntimeError if the layout is for other microbatches."""
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

"""Context parallelism of models of transformers, through transformers' interface for attention kernels.

    transformers                          here
    attention kernel, chosen by name      `attend_split`, registered as `NAME`
    masks                                 none: no masks are registered for `NAME`, and models then make none
    keywords of forward                   handed down to every attention: `KEYWORD` is the `SplitForward` of a forward
    position_ids                          those of the rank's tokens, so rotary and learned positions are right

A kernel without masks is told all that it needs by keywords: scale, window, cap and sinks. Masks of the rank's queries
are made from them here (context/scores.py), one for each width of window, and shared by all layers of a forward.

Only attention is replaced. Models that carry something else from token to token, such as state-space layers and
convolutions, are refused where their layers tell so, and after the trial of a small copy (context/trial.py).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dzero.parallel.context.attention import ContextAttention
from dzero.parallel.context.scores import Scores, seen_keys
from dzero.parallel.context.trial import ALLOWED, RANKS, JoinedRows, differs_when_cut
from dzero.parallel.context.zigzag import Zigzag
from dzero.utils.forward_hooks import after_forward, before_forward

NAME, KEYWORD = "dzero_context", "split_forward"
LAYERS = ("full_attention", "sliding_attention")
"""Kinds of layers whose masks a kernel is told by keywords."""
BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary positions whose frequencies depend on the largest position that they see."""
WHOLE = "take mesh.cp=1"


def transformers_model(model: nn.Module) -> Any:
    """Return the outermost model of transformers inside of `model`, or None; transformers is not imported for it."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return None
    return next((each for each in model.modules() if isinstance(each, transformers.PreTrainedModel)), None)


class SplitForward:
    """State that the attentions of one forward share: the split, and the masks so far, by the width of their window."""

    def __init__(self, attention: ContextAttention, ranks: int, positions: Tensor | None) -> None:
        self.calls = 0
        self._attention, self._ranks, self._positions = attention, ranks, positions
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores, window: int | None) -> Tensor:
        """Return the attention [batch, heads, part, head_dim] of this rank's queries. All ranks call this.

        Values may have fewer dims than keys; they are sent with zeros in their place.
        """
        self.calls += 1
        mask = self._mask(query.shape[2] * self._ranks, query.device, window, scores)
        lacking = key.shape[-1] - value.shape[-1]
        if lacking:
            return self._attention(query, key, F.pad(value, (0, lacking)), mask, scores)[..., : value.shape[-1]]
        return self._attention(query, key, value, mask, scores)

    def _mask(self, time: int, device: torch.device, window: int | None, scores: Scores) -> Tensor | None:
        width = None if window is None or window >= time else window
        if width not in self._masks:
            needed = self._positions is not None or width is not None or not scores.is_fused
            queries = self._attention.queries(time, device) if needed else None
            self._masks[width] = None if queries is None else seen_keys(queries, time, self._positions, width)
        return self._masks[width]


class SplitModel:
    """A model of transformers whose attention covers sequences that ranks share; it is changed in place.

    Args:
        model: A `PreTrainedModel`.
        zigzag: This rank's part of every sequence.
        attention: Attention over cut sequences.
        kind: Name of the attention, `mesh.cp_attention`.

    Raises:
        ValueError: If the model does not leave attention to a kernel, has layers of other kinds, asks for what the
            attention does not do, or a small copy of it computes something else from cut sequences.
    """

    def __init__(self, model: Any, zigzag: Zigzag, attention: ContextAttention, kind: str) -> None:
        self._zigzag, self._attention, self._model = zigzag, attention, model
        self._what = f"mesh.cp={zigzag.ranks}: {type(model).__name__}"
        _check_kind(model, self._what)
        if kind == "ring":
            _check_ring(model)
        eager = torch.compiler.disable(attend_split)  # type: ignore[no-untyped-call]
        sys.modules["transformers"].AttentionInterface.register(NAME, eager)
        _try_small(model, self._what)
        model.set_attn_implementation(NAME)  # where it has no effect, the trial has found a difference
        before_forward(model, self._give, with_kwargs=True)
        after_forward(model, self._count, with_kwargs=True)

    def _give(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add what attention needs to the keywords of a forward, and cut the positions."""
        unknown = [
            name for name in ("attention_mask", "labels", "past_key_values", "cache") if kwargs.get(name) is not None
        ]
        if unknown or len(args) > 1:
            raise ValueError(
                f"{self._what} was given {', '.join(unknown) or 'several positional arguments'}: with cut sequences it "
                "takes input_ids and position_ids alone; make the loss from its logits, and leave padding unmasked at "
                "the end"
            )
        given = next(each for each in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if each is not None)
        positions, part = kwargs.get("position_ids"), given.shape[1]
        if positions is not None and positions.shape != (len(given), part * self._zigzag.ranks):
            raise ValueError(
                f"{self._what}: position_ids {[*positions.shape]} for a part {[*given.shape[:2]]} of the sequences; "
                "give those of whole sequences"
            )
        if positions is None:
            own = self._zigzag.positions(part).to(given.device).expand(len(given), -1)
        else:
            own = self._zigzag.part(positions)
        forward = SplitForward(self._attention, self._zigzag.ranks, positions)
        return args, {"use_cache": False, **kwargs, "position_ids": own, KEYWORD: forward}

    def _count(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Raise ValueError if the forward has layers that did not attend by this kernel."""
        calls, layers = kwargs[KEYWORD].calls, self._model.config.get_text_config().num_hidden_layers
        if calls < layers:
            raise ValueError(
                f"{self._what} has {layers} layers, of which {calls} attend by the kernel that covers cut sequences; "
                f"{WHOLE}"
            )


def attend_split(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention [batch, part, heads, head_dim] over cut sequences, as a kernel of transformers.

    Args:
        module: The model's attention.
        query: Queries of this rank's tokens [batch, heads, part, head_dim].
        key: Their keys [batch, kv_heads, part, head_dim].
        value: Their values [batch, kv_heads, part, head_dim or fewer].
        attention_mask: None; a model that makes masks of its own is refused.
        scaling: Factor of query . key.
        dropout: Probability with which a weight becomes 0.
        sliding_window: Number of keys that a query sees at most.
        softcap: Limit of the scores.
        s_aux: Sinks, a score of each head [heads].
        others: What the model hands to all kernels, with the `SplitForward`.

    Raises:
        ValueError: If the model does not hand on the `SplitForward`, or asks for attention that is not causal.
    """
    forward, name = others.get(KEYWORD), type(module).__name__
    if not isinstance(forward, SplitForward):
        raise ValueError(f"{name} does not hand the keywords of its model's forward to attention; {WHOLE}")
    causal = others.get("is_causal")
    own = {
        "a mask of its own": attention_mask is not None,
        "a bias of its scores": others.get("position_bias") is not None,
        "attention to later tokens": not (getattr(module, "is_causal", True) if causal is None else causal),
        "keys of other tokens": key.shape[2] != query.shape[2],
    }
    if any(own.values()):
        asked = next(what for what, is_there in own.items() if is_there)
        raise ValueError(f"{name} asks for {asked}, which attention over cut sequences does not do; {WHOLE}")
    scores = Scores(scale=scaling, cap=softcap, sinks=s_aux, dropout=dropout)
    mixed = forward.attend(query, key, value, scores, sliding_window)
    return mixed.transpose(1, 2).contiguous(), None


def _try_small(model: Any, what: str) -> None:
    """Raise ValueError if a small copy computes something else from cut sequences than from whole ones."""
    keywords = {KEYWORD: SplitForward(JoinedRows(), RANKS, None)}
    apart = differs_when_cut(model, what, keywords, lambda small: small.set_attn_implementation(NAME))
    if not apart <= ALLOWED:
        raise ValueError(
            f"{what} computes something else from cut sequences (in a small copy, logits are off by {apart:.2g} of "
            f"their length), so a part of it other than attention needs other tokens; {WHOLE}"
        )


def _check_kind(model: Any, what: str) -> None:
    """Raise ValueError for models that do not tell a kernel everything, or carry states beside attention."""
    flags = ("_supports_attention_backend", "_supports_flash_attn")
    if not all(getattr(model, flag, False) for flag in flags):
        raise ValueError(
            f"{what} does not leave its attention to kernels without masks (in transformers, one of {[*flags]} is "
            f"false); {WHOLE}"
        )
    kinds = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())}
    if unknown := sorted(kinds - {*LAYERS}):
        raise ValueError(f"{what} has layers of kind {', '.join(unknown)}, which need whole sequences; {WHOLE}")
    config = model.config.get_text_config()
    ropes = _rope_types(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    if by_length := sorted(ropes & {*BY_LENGTH}):
        raise ValueError(
            f"{what} has rotary positions of type {by_length[0]}, which depend on the length of a forward's input; "
            f"{WHOLE}"
        )
    if found := [name for name, each in model.named_modules() if isinstance(each, nn.Conv1d)]:
        raise ValueError(f"{what} has a convolution over time, {found[0]}, which needs whole sequences; {WHOLE}")


def _rope_types(parameters: object) -> set[str]:
    """Return the types of rotary positions in transformers' parameters, which may differ by the kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    inner = set[str]().union(*(_rope_types(each) for each in parameters.values()))
    return inner | {str(parameters[key]) for key in ("rope_type", "type") if key in parameters}


def _check_ring(model: Any) -> None:
    """Raise ValueError if the model asks for what rings do not do."""
    config = model.config.get_text_config()
    keys = ("sliding_window", "attn_logit_softcapping", "attention_dropout")
    asked = {key: getattr(config, key, None) for key in keys}
    asked |= {name: "sinks" for name, _ in model.named_parameters() if name.endswith("sinks")}
    for name, value in asked.items():
        if value:
            raise ValueError(
                f"mesh.cp_attention=ring: {type(model).__name__} has {name}={value}, and torch's ring attention takes "
                "no masks, caps, sinks or dropout; take mesh.cp_attention=all_gather or ulysses"
            )

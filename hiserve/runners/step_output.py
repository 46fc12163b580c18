"""The end of a step: logits after a partial graph; tokens drawn, drafts accepted, rows advanced, words packed for the host."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.core.drafts import DraftStep
from hiserve.core.forward import ForwardInputs, ForwardOutputs
from hiserve.core.plan import BatchPlan, Int32Array, Scores, StepResult
from hiserve.core.step_memory import DRAWN_SLICE
from hiserve.core.upload import upload
from hiserve.kernels.step_ops import StepInputs, TokenMasks
from hiserve.models.loading import AnyDecoder
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.draft_graphs import DraftGraphs
from hiserve.sampling.logit_shares import DrawOps
from hiserve.sampling.params import Drawing
from hiserve.sampling.sampler import pack_scores, sample


@dataclass(frozen=True, slots=True, eq=False)
class DeviceOutput:
    """The outcome of a step for the host, still on the device.

    Attributes:
        words: int32, on the device: B legal flags, S counts, S * width tokens, then the packed scores of these tokens
            and of the prompt, if any. A padded step has more rows here than its plan.
        num_rows: B.
        num_sampling: S.
        width: Most tokens that a row may emit.
        num_top: Likeliest tokens in each of the tokens' scores; None without scores.
        num_prompt_top: Likewise for the prompt's.
        deferred: Why the step did not run; empty if it did.
    """

    words: Tensor
    num_rows: int
    num_sampling: int
    width: int = 1
    num_top: int | None = None
    num_prompt_top: int | None = None
    deferred: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step that was launched and recorded.

    Attributes:
        output: For the host.
        inputs: Of the plan's rows, and perhaps of others that pad them.
        hidden_states: ``[T, n]``, of ``Proposer.aux_layers``, padding tokens included; None without such layers.
        is_greedy: No row draws at random.
        drafts: Graphs of the proposer's work after it, if there are any.
    """

    output: DeviceOutput
    inputs: StepInputs
    hidden_states: Tensor | None
    is_greedy: bool
    drafts: DraftGraphs | None = None


# The second half of a step whose forward was launched, on the same stream: it reads logits, lengths, tokens and sampling
# parameters of the rows, and ``DeviceRows.masks`` if the argument says that this step has some.
Draw = Callable[[bool], LaunchedStep]


class LogitsHead:
    """Computes logits of as many tokens as some graph of a whole step does.

    Libraries choose kernels of products by their size, and load each at its first use: on an H200 27 ms for the products
    after the last attention. The sizes of graphs are loaded when they are captured.

    Args:
        sizes: Logits of graphs, ascending. Steps with more than the last have as many as they have.
    """

    def __init__(self, model: AnyDecoder, sizes: tuple[int, ...]) -> None:
        self._model = model
        self._sizes = sizes

    def padded(self, count: int) -> int:
        """Returns how many logits are computed for so many."""
        index = bisect_left(self._sizes, count)
        return self._sizes[index] if count and index < len(self._sizes) else count

    def finish(
        self, reached: tuple[Tensor, ...], inputs: ForwardInputs, hidden_states: Tensor | None
    ) -> ForwardOutputs:
        """Computes the part of a step after the last attention of a replay; the first token again for each that a size has more.

        Args:
            reached: From the model's ``trunk``, each of at least the step's T tokens.
            inputs: Of the step.
            hidden_states: Likewise; None where the model makes them in ``finish``, or has no ``aux_layers``.
        """
        num_tokens, count = inputs.input_ids.shape[0], inputs.logits_rows.shape[0]
        if hidden_states is not None:
            hidden_states = hidden_states[:num_tokens] if inputs.wants_hidden_states else None
        more = self.padded(count) - count
        if more:
            inputs = replace(inputs, logits_rows=F.pad(inputs.logits_rows, (0, more)))
        outputs = self._model.finish(tuple(each[:num_tokens] for each in reached), inputs, hidden_states)
        return replace(outputs, logits=outputs.logits[:count])


def finish_step(
    plan: BatchPlan, inputs: StepInputs, logits: Tensor, rows: DeviceRows, *, is_masked: bool = False
) -> DeviceOutput:
    """Draws every row's tokens as its parameters say, and records them in the rows.

    Args:
        plan: Of B rows.
        inputs: Of the same rows.
        logits: ``[S * width + P, vocab_size]``, of a rank of a group those of its tokens. Unchanged.
        rows: Changed.
        is_masked: ``rows.masks`` limit the tokens of the first ``S * width`` rows of logits. Scores are the model's own.
    """
    num_sampling, width = inputs.sampling.shape[0], inputs.width
    num_drawn = num_sampling * width
    masks = rows.masks.of(num_drawn) if is_masked else None
    host_rows, ops = plan.rows[plan.samples], rows.draw_ops
    drawing, num_top = rows.sampling.drawing(host_rows), rows.sampling.num_top(host_rows)
    if rows.shares is not None and (drawing is Drawing.ANY or num_top is not None or inputs.scored_tokens is not None):
        logits, ops = rows.shares.whole(logits), rows.ops
    sampled_logits, scored_logits = logits[:num_drawn], logits[num_drawn:]
    if drawing is Drawing.ANY:
        drawn = _draw_any(inputs, sampled_logits, rows, host_rows, masks)
    else:
        drawn = draw(inputs, sampled_logits, rows, drawing, ops, masks)
    words = [record(inputs, drawn.view(num_sampling, width), rows)]
    if num_top is not None:
        if inputs.path is not None:
            places = torch.arange(num_sampling, device=drawn.device)[:, None] * width + inputs.path
            sampled_logits, drawn = sampled_logits.index_select(0, places.view(-1)), drawn[places.view(-1)]
        words.append(pack_scores(sampled_logits, drawn, num_top).view(-1))
    num_prompt_top = None
    if inputs.scored_tokens is not None:
        num_prompt_top = rows.sampling.num_prompt_top(plan.rows[plan.num_scored > 0])
        assert num_prompt_top is not None, f"step {plan.step_id} scores prompts of rows that want no scores"
        words.append(pack_scores(scored_logits, inputs.scored_tokens, num_prompt_top).view(-1))
    all_words = torch.cat(words) if len(words) > 1 else words[0]
    return DeviceOutput(all_words, plan.rows.size, num_sampling, inputs.num_emitted, num_top, num_prompt_top)


def draw(
    inputs: StepInputs,
    logits: Tensor,
    rows: DeviceRows,
    drawing: Drawing,
    ops: DrawOps,
    masks: TokenMasks | None = None,
) -> Tensor:
    """Draws where all rows are greedy or draw from all tokens: in a few launches, which a graph can hold.

    Args:
        inputs: Of S sampling rows.
        logits: ``[S * width, vocab_size]``. Unchanged.
        rows: Unchanged.
        drawing: Not ``ANY``.
        ops: For whole logits, or those of a rank's tokens.
        masks: Of the logits; None allows all tokens.

    Returns:
        int64 ``[S * width]``.
    """
    assert drawing is not Drawing.ANY, "there is more to do"
    if drawing is Drawing.GREEDY:
        return ops.greedy(logits, masks)
    temperature, seed, choice = rows.sampling.free_draws(_drawing_rows(inputs))
    return ops.draw_free(logits, temperature, seed, choice, _positions(inputs), temperature > 0, masks)


def _draw_any(
    inputs: StepInputs, logits: Tensor, rows: DeviceRows, host_rows: Int32Array, masks: TokenMasks | None
) -> Tensor:
    """Draws a slice of rows at a time: it needs many times the memory of the logits, of which drafts add more."""
    tokens = rows.tokens.narrow(1, 0, inputs.forward.max_kv_len)
    host_rows, drawing_rows, positions = np.repeat(host_rows, inputs.width), _drawing_rows(inputs), _positions(inputs)
    ahead = None if inputs.path is None else _ahead(inputs)
    drawn = []
    for first in range(0, host_rows.size, DRAWN_SLICE):
        ours = slice(first, first + DRAWN_SLICE)
        batch = rows.sampling.gather(
            host_rows=host_rows[ours],
            rows=drawing_rows[ours],
            position=positions[ours],
            tokens=tokens,
            ahead=None if ahead is None else (ahead[0][ours], ahead[1][ours]),
        )
        drawn.append(sample(logits[ours], replace(batch, masks=_part(masks, ours))))
    return torch.cat(drawn) if len(drawn) > 1 else drawn[0]


def _ahead(inputs: StepInputs) -> tuple[Tensor, Tensor]:
    """Returns the tokens on the path to each node that draws: their positions int64 ``[S * width, max_depth + 1]``, and themselves.

    Paths of other depths repeat their last token.
    """
    forward, drawing = inputs.forward, _drawing_tokens(inputs)
    assert forward.tree_mask is not None and inputs.path is not None, "drafts are chains"
    bits = forward.tree_mask.index_select(0, drawing)[:, None] >> torch.arange(inputs.width, device=drawing.device) & 1
    depth = torch.arange(inputs.path.shape[1], device=drawing.device)[:, None]
    is_ancestor = (bits[:, None] == 1) & (bits.cumsum(1)[:, None] == 1 + depth)  # at each depth at most one node
    roots = drawing - inputs.offsets.index_select(0, drawing)
    tokens = torch.where(is_ancestor.any(2), roots[:, None] + is_ancestor.int().argmax(2), drawing[:, None])
    return forward.positions[tokens], forward.input_ids[tokens]


def _part(masks: TokenMasks | None, which: slice) -> TokenMasks | None:
    return None if masks is None else replace(masks, entries=masks.entries[which])


def _drawing_rows(inputs: StepInputs) -> Tensor:
    """Returns the row of each token to draw, int64 ``[S * width]``."""
    return inputs.rows.index_select(0, inputs.sampling)[:, None].expand(-1, inputs.width).reshape(-1)


def _drawing_tokens(inputs: StepInputs) -> Tensor:
    """Returns the token of the step after which each token is drawn, int64 ``[S * width]``."""
    return inputs.forward.logits_rows[: inputs.sampling.shape[0] * inputs.width]


def _positions(inputs: StepInputs) -> Tensor:
    """Returns the absolute position of each token to draw, int64 ``[S * width]``."""
    return inputs.forward.positions.index_select(0, _drawing_tokens(inputs)).add_(1)


def record(inputs: StepInputs, drawn: Tensor, rows: DeviceRows) -> Tensor:
    """Accepts drafts that were drawn, and adds the step's computed and emitted tokens to the rows.

    Keys and values of accepted nodes are moved to their positions first: if the step fails between the two, its rows are
    computed again.

    Args:
        inputs: Of B rows.
        drawn: int64 ``[S, width]``.
        rows: Changed.

    Returns:
        int32 ``[B + S + S * num_emitted]``; see ``DeviceOutput``.
    """
    sampling_rows = inputs.rows.index_select(0, inputs.sampling)
    num_draft = inputs.num_draft.index_select(0, inputs.sampling)
    if inputs.path is None:
        counts = rows.ops.accept(drawn, sampling_rows, num_draft, rows.state)
    else:
        counts, path = rows.ops.walk(drawn, sampling_rows, num_draft, rows.state)
        starts = inputs.forward.qo_indptr.index_select(0, inputs.sampling)
        rows.ops.move(rows.storages, inputs.forward.slots, starts, path, counts)
        inputs.path.copy_(path)
        drawn = drawn.gather(1, path)
    return rows.ops.advance(inputs, drawn, counts, rows.state)


def draft_step(plan: BatchPlan, launched_step: LaunchedStep) -> DraftStep:
    """Returns a launched step for a proposer; of rows that verified trees it has the accepted paths alone, as chains."""
    inputs, num_rows = launched_step.inputs, plan.rows.size
    starts = inputs.forward.qo_indptr[: num_rows + 1].long()
    q_lens, states = plan.num_new, launched_step.hidden_states
    if inputs.path is not None:
        longest = np.int32(inputs.path.shape[1])
        q_lens = np.where(plan.num_draft > 0, np.minimum(plan.num_new, longest), plan.num_new)
        if states is not None:
            states = states.index_select(0, _on_paths(plan, q_lens, inputs.path))
    return DraftStep(
        rows=inputs.rows[:num_rows],
        first=inputs.forward.kv_lens[:num_rows] - starts.diff(),
        legal=inputs.legal[:num_rows],
        sampling=inputs.sampling[: int(plan.samples.sum())],
        q_lens=q_lens,
        kv_bounds=plan.max_len - (plan.num_new - q_lens),
        num_draft=plan.num_propose,
        is_greedy=launched_step.is_greedy,
        continuations=None if plan.continuations is None else upload((plan.continuations,), inputs.rows.device)[0],
        hidden_states=None if states is None else states[: int(q_lens.sum())],
    )


def _on_paths(plan: BatchPlan, q_lens: Int32Array, path: Tensor) -> Tensor:
    """Returns the tokens of a step that its rows keep, in row order: int64 ``[q_lens.sum()]``, indices into all of them."""
    counts = q_lens.astype(np.int64)
    rows = np.repeat(np.arange(counts.size), counts)
    offsets = np.arange(rows.size) - (np.cumsum(counts) - counts)[rows]
    starts = (np.cumsum(plan.num_new) - plan.num_new)[rows]
    is_node = plan.num_draft[rows] > 0
    in_path = np.where(is_node, (np.cumsum(plan.samples) - 1)[rows] * path.shape[1] + offsets, 0)
    firsts, in_paths, nodes = upload((starts + np.where(is_node, 0, offsets), in_path, is_node), path.device)
    return firsts + path.view(-1).index_select(0, in_paths) * nodes


def read_output(plan: BatchPlan, output: DeviceOutput, words: Int32Array) -> StepResult:
    """Unpacks the words, in the order in which ``DeviceOutput`` lists them."""
    if not output.num_rows:
        nothing = np.empty(0, dtype=np.int32)
        return StepResult(plan.step_id, counts=nothing, tokens=nothing[:, None], deferred=output.deferred)
    num_rows, num_sampling, width = output.num_rows, output.num_sampling, output.width
    legal, counts, tokens, packed = np.split(words, np.cumsum((num_rows, num_sampling, num_sampling * width)))
    legal, counts = legal[: plan.rows.size] != 0, counts[: plan.samples.sum()]
    scores = prompt_scores = None
    if output.num_top is not None:
        num_words = num_sampling * width * (1 + 2 * output.num_top)
        scores, packed = Scores.unpack(packed[:num_words].tobytes(), output.num_top), packed[num_words:]
    if output.num_prompt_top is not None:
        prompt_scores = Scores.unpack(packed.tobytes(), output.num_prompt_top)
    return StepResult(
        step_id=plan.step_id,
        counts=counts,
        tokens=tokens.reshape(-1, width)[: counts.size],
        scores=scores,
        prompt_scores=prompt_scores,
        faults=plan.rows[~legal],
    )

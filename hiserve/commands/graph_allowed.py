"""Where the hot path may do what ``graph_scan`` looks for, and why it does no harm there."""

from __future__ import annotations

from hiserve.commands.graph_scan import Allowed

_ON_CPU = "the CPU's own; never on CUDA"
_DEBUGGING = "with --kv-canary alone, whose steps are never captured"
_LOADING = "when a head is loaded"
_AT_START = "while graphs are captured, before the first request"
_COPIED = "until an earlier step's schedule was copied, which lies before the forward that runs now"

ALLOWED = (
    Allowed("attention/cpu.py", "CpuAttention.plan", ".numpy()", _ON_CPU),
    Allowed("attention/cpu.py", "CpuAttention.plan", ".tolist()", _ON_CPU),
    Allowed("attention/flashinfer.py", "_Turn.plan", "synchronize", _COPIED),
    Allowed("attention/flashinfer_graph.py", "GraphAttention.plan", "synchronize", _COPIED),
    Allowed("kernels/sampling.py", "ascending", ".numpy()", _ON_CPU),
    Allowed("kernels/sampling.py", "argmax", ".numpy()", _ON_CPU),
    Allowed("layers/moe.py", "SparseExperts.__call__", ".tolist()", _ON_CPU),
    Allowed("layers/moe.py", "SparseExperts.__call__", "bincount", _ON_CPU),
    Allowed("models/draft.py", "Eagle3Head.__init__", "torch.equal", _LOADING),
    Allowed("models/draft_weights.py", "*", "*", _LOADING),
    Allowed("models/reading.py", "*", "*", "while weights are read, before the first step"),
    Allowed("models/frequencies.py", "rotary_frequencies", "tensor of values", "when the model is built"),
    Allowed("runners/canary.py", "Canary.*", "*", _DEBUGGING),
    Allowed("runners/canary.py", "_describe", "int(tensor)", _DEBUGGING),
    Allowed("runners/capture.py", "Capture.on_stream", "synchronize", _AT_START),
    Allowed("runners/draft_graphs.py", "_check", "torch.equal", _AT_START),
    Allowed("runners/graph.py", "GraphRunner._fill", ".numpy()", "pinned memory of the host, filled before the replay"),
    Allowed("runners/graph.py", "_check_replay", "torch.equal", _AT_START),
    Allowed("runners/mixed.py", "MixedRunner._capture_bucket", "torch.equal", _AT_START),
    Allowed("runners/piecewise.py", "PiecewiseRunner._capture_bucket", "torch.equal", _AT_START),
    Allowed("spec/adaptive.py", "*", "*", "the planner's, which has no tensors"),
)

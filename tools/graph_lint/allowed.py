"""The exceptions from the rules of ``scan``, each with its reason."""

from __future__ import annotations

from tools.graph_lint.scan import Allowed

_ON_CPU = "the CPU's own; never on CUDA"
_DEBUGGING = "with --kv-canary alone, whose steps are never captured"
_LOADING = "when a model or a head is loaded"
_AT_START = "while graphs are captured, before the first request"
_AT_END = "when no step follows"
_CACHED = "torch's allocator reuses the memory of the step before, and a graph owns its memory"
_PINNED = "pinned memory, which torch's allocator keeps"
_CHECKING = "a check of its own, no step of a request"
_OTHER_THREAD = "in a thread that waits so that no other does"
_MADE = "when pool and model are made"
_COPIED = "until an earlier step's schedule was copied, which lies before the forward that runs now"

ALLOWED = (
    Allowed("attention/cpu.py", "CpuAttention.plan", ".numpy()", _ON_CPU),
    Allowed("attention/cpu.py", "CpuAttention.plan", ".tolist()", _ON_CPU),
    Allowed("attention/cpu.py", "CpuAttention._see_trees", ".numpy()", _ON_CPU),
    Allowed("attention/cpu.py", "CpuAttention._stretches", ".tolist()", _ON_CPU),
    Allowed("attention/cpu.py", "CpuAttention._stretches", "tensor of values", _ON_CPU),
    Allowed("attention/flashinfer.py", "_BatchSchedule.plan", "synchronize", _COPIED),
    Allowed("attention/flashinfer_calls.py", "pin", "tensor of values", _PINNED),
    Allowed("attention/flashinfer.py", "_GraphAttention.plan", "synchronize", _COPIED),
    Allowed("attention/flashinfer_latent.py", "_Turn.plan", "synchronize", _COPIED),
    Allowed("attention/flashinfer_latent.py", "_GraphAttention.plan", "synchronize", _COPIED),
    Allowed("attention/flashinfer_latent.py", "FlashInferPrompts.plan", "synchronize", _COPIED),
    Allowed("cache/storage/host.py", "HostPool.__init__", "tensor of values", _MADE),
    Allowed("cache/storage/host.py", "HostPool.contents", "tensor of values", _ON_CPU),
    Allowed("cache/storage/host.py", "HostPool.put_images", "tensor of values", _ON_CPU),
    Allowed("cache/storage/device.py", "layer_views", "iteration", _MADE),
    Allowed("cache/storage/page_streams.py", "PageStreams.compile", "allocation", _AT_START),
    Allowed(
        "cache/storage/page_streams.py", "PageStreams.drain", "synchronize", "at the end, when no step is in flight"
    ),
    Allowed("cache/storage/page_streams.py", "PageStreams._upload", "*", _PINNED),
    Allowed("cache/storage/cuda_transfer.py", "CudaTransfers._wait_for_room", "synchronize", _OTHER_THREAD),
    Allowed("cache/storage/cuda_transfer.py", "CudaTransfers._settle", "synchronize", _OTHER_THREAD),
    Allowed("cache/storage/host.py", "empty_image", "allocation", _ON_CPU),
    Allowed("cache/storage/transfer.py", "ThreadTransfers._move_windows", "allocation", _ON_CPU),
    Allowed("cache/storage/transfer.py", "ThreadTransfers._move", "tensor of values", _ON_CPU),
    Allowed("core/drafts.py", "DraftLayout.uniform", "allocation", _CACHED),
    Allowed("core/upload.py", "mapped", "tensor of values", "a view of pinned memory, read by a kernel"),
    Allowed("core/upload.py", "upload", ".numpy()", _PINNED),
    Allowed("core/upload.py", "upload", "allocation", _PINNED),
    Allowed("kernels/sampling.py", "ascending", "*", _ON_CPU),
    Allowed("kernels/sampling.py", "argmax", "*", _ON_CPU),
    Allowed("layers.py", "SparseExperts.__call__", ".tolist()", _ON_CPU),
    Allowed("layers.py", "SparseExperts.__call__", "bincount", _ON_CPU),
    Allowed("models/conversion.py", "mxfp4_pairs", "tensor of values", "on the CPU, before weights are converted"),
    Allowed("models/draft_heads.py", "Eagle3Head.__init__", "torch.equal", _LOADING),
    Allowed("models/block_scales.py", "check_values", "*", _LOADING),
    Allowed("models/four_bits.py", "unpack_weight", "int(tensor)", _LOADING),
    Allowed("models/four_bits.py", "_order", "torch.equal", _LOADING),
    Allowed("models/quantized_weights.py", "_join_four_bits", "torch.equal", _LOADING),
    Allowed("models/quantized_weights.py", "_stage", "iteration", _LOADING),
    Allowed("models/conversion.py", "read_converted", "iteration", _LOADING),
    Allowed("models/packed_rows.py", "read_packed", "iteration", _LOADING),
    Allowed("models/shard_weights.py", "read_part", "*", _LOADING),
    Allowed("models/weights.py", "load_head_parameters", "*", _LOADING),
    Allowed("models/weights.py", "_refuse_strange_experts", "*", _LOADING),
    Allowed("models/weights.py", "_tokens", "*", _LOADING),
    Allowed("models/expert_weights.py", "_check_exponents", "*", _LOADING),
    Allowed("models/expert_weights.py", "_check_factors", "*", _LOADING),
    Allowed("models/expert_weights.py", "_pack", "iteration", _LOADING),
    Allowed("models/frequencies.py", "rotary_frequencies", "tensor of values", "when the model is built"),
    Allowed("models/stream_decoder.py", "Rotary.__init__", "tensor of values", _MADE),
    Allowed("models/reading.py", "*", "*", "while weights are read, before the first step"),
    Allowed("runners/canary.py", "Canary.*", "*", _DEBUGGING),
    Allowed("runners/canary.py", "_describe", "int(tensor)", _DEBUGGING),
    Allowed("runners/capture.py", "Capture.check_failure", "synchronize", _AT_START),
    Allowed("runners/capture.py", "Capture.on_stream", "synchronize", _AT_START),
    Allowed("runners/draft_graphs.py", "DraftCapture.after", "allocation", _AT_START),
    Allowed("runners/draft_graphs.py", "_check", "*", _AT_START),
    Allowed("runners/graph.py", "GraphRunner._capture_bucket", "allocation", _AT_START),
    Allowed("runners/graph.py", "GraphRunner._fill", ".numpy()", "pinned memory of the host, filled before the replay"),
    Allowed("runners/graph.py", "GraphRunner._fill", "allocation", _PINNED),
    Allowed("runners/graph.py", "_check_replay", "torch.equal", _AT_START),
    Allowed("runners/inputs.py", "_unfilled", "allocation", _CACHED),
    Allowed("runners/inputs.py", "_upload", "allocation", _CACHED),
    Allowed("runners/inputs.py", "new_path", "allocation", _CACHED),
    Allowed("runners/inputs.py", "no_states", "allocation", _CACHED),
    Allowed("runners/inputs.py", "uniform_inputs", "allocation", _AT_START),
    Allowed("runners/mixed.py", "MixedRunner._capture_bucket", "*", _AT_START),
    Allowed("runners/piecewise.py", "PiecewiseRunner._capture_bucket", "*", _AT_START),
    Allowed("runners/piecewise.py", "_padding", "allocation", _AT_START),
    Allowed("runners/device_rows.py", "_chains", "allocation", _MADE),
    Allowed("runners/device_rows.py", "_windows", "allocation", _MADE),
    Allowed("runners/device_rows.py", "DeviceRows.warm_up", "allocation", _AT_START),
    Allowed("runners/step_output.py", "_ahead", "allocation", _CACHED),
    Allowed("runners/step_output.py", "finish_step", "allocation", _CACHED),
    Allowed("engine/draft_costs.py", "DraftTimer._now", "synchronize", _AT_START),
    Allowed("engine/draft_costs.py", "DraftTimer._once", "int(tensor)", _AT_START),
    Allowed("engine/draft_costs.py", "DraftTimer._once", "tensor of values", _AT_START),
    Allowed("engine/executor.py", "Executor.close", "synchronize", _AT_END),
    Allowed("engine/executor.py", "Executor._finish", ".numpy()", _ON_CPU),
    Allowed("engine/executor.py", "Executor._finish", "allocation", _PINNED),
    Allowed(
        "engine/executor.py", "Executor.drafts", "*", "masks need the drafts; the forward after them runs meanwhile"
    ),
    Allowed("runners/device_rows.py", "MaskBuffers.lend", "*", "pinned memory; its last copy was waited for by a draw"),
    Allowed(
        "engine/executor.py", "Executor._free_memory", "synchronize", "once memory has run out, when a step failed"
    ),
    Allowed("engine/executor.py", "Executor._nothing", "allocation", "of no elements, for a plan without rows"),
    Allowed("engine/executor.py", "Executor._read", "*", _OTHER_THREAD),
    Allowed("spec/rehearsed.py", "RehearsedReplies.record", "tensor of values", "between runs of a benchmark"),
    Allowed("engine/startup.py", "CudaMemoryMeter.begin", "synchronize", _AT_START),
    Allowed("engine/graph_check.py", "*", "*", _CHECKING),
)

"""Time and memory of the shape lint of a 70 B-parameter model: forward and backward on the meta device.

    python benchmarks/shape_lint.py [--json benchmarks/results/shape_lint-cpu.json]

The model is a Llama of Transformers, built on the meta device in bfloat16: hidden size 8192, 80 layers, 64 heads (8 of keys
and values), intermediate size 28672, vocabulary 128256; one sequence of 2,048 tokens. Each run is a new process, so the times
are those of a first use. Imports and building the model are listed separately. The memory is the process's peak, with torch
and Transformers.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from machine import arguments, write_results

LLAMA_70B = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}


def one_run(tokens: int, gpu: str) -> dict[str, float | int]:
    """Run in this process; return the seconds of each part."""
    start = time.perf_counter()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from mpinspect.shapes.lint import lint_shapes
    from mpinspect.shapes.record.recording import record_matmuls

    imported = time.perf_counter()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_70B)).to(torch.bfloat16)
        batch = {name: torch.zeros(1, tokens, dtype=torch.int64) for name in ("input_ids", "labels")}
    built = time.perf_counter()
    recording = record_matmuls(model, (), batch)
    recorded = time.perf_counter()
    memory_recorded = peak_mb()
    report = lint_shapes(model, (), batch, gpu=gpu)
    linted = time.perf_counter()
    str(report)
    written = time.perf_counter()
    roles = {record.role for record in recording.matmuls}
    if recording.notes or not {"forward", "dgrad", "wgrad", "backward"} <= roles:
        raise RuntimeError(f"the recording is not whole: {roles}, {recording.notes}")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "products": sum(record.calls for record in recording.matmuls),
        "pflop": sum(record.flops * record.calls for record in recording.matmuls) / 1e15,
        "import_s": imported - start,
        "build_s": built - imported,
        "record_s": recorded - built,
        "lint_s": linted - recorded,
        "text_s": written - linted,
        "peak_mb_recorded": memory_recorded,
        "peak_mb": peak_mb(),
    }


def peak_mb() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def summary(runs: list[dict[str, float | int]]) -> dict[str, Any]:
    """Return the medians of the times, the largest memory, and the figures that are equal in every run."""
    times = [name for name in runs[0] if name.endswith("_s")]
    memory = [name for name in runs[0] if name.startswith("peak_mb")]
    fixed = {name: runs[0][name] for name in ("parameters", "products", "pflop")}
    medians = {f"{name}_median": statistics.median(run[name] for run in runs) for name in times}
    slowest = {f"{name}_max": max(run[name] for run in runs) for name in ("record_s", "lint_s")}
    return {
        "runs": len(runs),
        **fixed,
        **medians,
        **slowest,
        **{name: max(run[name] for run in runs) for name in memory},
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--gpu", default="hopper")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--one", action="store_true", help="a single run in this process, its numbers as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_run(options.tokens, options.gpu)))
        return
    command = [sys.executable, __file__, "--one", "--tokens", str(options.tokens), "--gpu", options.gpu]
    runs = []
    for _ in range(options.runs):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    results = summary(runs)
    print(json.dumps(results, indent=2))
    if options.json:
        write_results(options.json, results)


if __name__ == "__main__":
    main()

"""Which events attribution does not need, told from the beginning of their text: decoding them is half of the work otherwise."""

from __future__ import annotations

import re

#: Calls that start nothing on the GPU, which are most of a trace's runtime events (CUDA Runtime and HIP API references).
_IDLE_CALLS = "(?:cuda|cu|hip)(?:Event|Stream|Device|Func|Occupancy|Pointer|Peek|Get|Host|Init|Ctx|Module[GU])"

#: From after the opening brace on. Only the order of keys that Kineto writes, with any white space; other orders are decoded.
_NOT_NEEDED = re.compile(
    r"""
    \s*"ph":\s*"(?:
        X",\s*"cat":\s*"(?:
            python_function",\s*"name":\s*"(?!nn\.Module:)
          | cuda_(?:runtime|driver)",\s*"name":\s*"IDLE_CALLS
          | cuda_sync" | gpu_user_annotation" | overhead"
        )
      | [sf]",\s*"id":\s*\d+,\s*"pid":\s*-?\d+,\s*"tid":\s*-?\d+,\s*"ts":\s*[\d.]+,\s*"cat":\s*"ac2g"
      | i",\s*"cat":\s*"cpu_instant_event"
    )
    """.replace("IDLE_CALLS", _IDLE_CALLS),
    re.VERBOSE,
)

#: ``not_needed(text)``: truthy for an event that can be left out. ``text``: of the event, without its opening brace.
not_needed = _NOT_NEEDED.match

"""An engine process whose tokens are random bytes below 0xF0, under the constraints of its requests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "engine"))

from uniform_executor import UniformExecutor

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.__main__ import main
from stoker_runtime.weights.upload_ahead import UploadAhead


def build(config: EngineConfig, ahead: UploadAhead | None) -> UniformExecutor:
    return UniformExecutor(
        num_pages=2048,
        page_size=16,
        max_num_seqs=16,
        max_model_len=4096,
        max_num_batched_tokens=256,
        vocab_size=0xF0,
        eos_token_ids=(0,),
    )


if __name__ == "__main__":
    sys.exit(main(build))

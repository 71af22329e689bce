# SPDX-License-Identifier: Apache-2.0
"""A model of latents through the runner: chunks, decodes, and pages that went to host memory and came back, against
the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tokenspeed.core.plan import RowKind

CONFIG = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 160,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPT = np.random.default_rng(1).integers(0, 97, 20).tolist()


def test_latents_serve_after_they_were_in_host_memory(tmp_path: Path, tools: Any) -> None:
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model("deepseek_v2", **CONFIG)
    oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for parameter in oracle.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
    path = tools.write_checkpoint(tmp_path / "tiny", {"model_type": "deepseek_v2", **CONFIG}, [oracle.state_dict()])
    runner = tools.new_runner(tools.engine_config(path, host_tokens=80))
    tokens: list[int] = []

    def launch(step_id: int, rows: list[tuple[int, ...]], token_ids: list[int], **plan: Any) -> None:
        seatings = plan.pop("seatings", [])
        output = runner.launch(tools.make_plan(step_id, rows, token_ids, **plan), seatings).wait()
        assert not output.result.fault
        tokens.extend(output.result.token_ids.tolist())

    seatings = [tools.make_seating(0, PROMPT)]
    pages = [(0, index, index + 1) for index in range(4)]
    launch(0, [(0, RowKind.PREFILL, 0, 13)], PROMPT[:13], seated=[0], pages=pages, seatings=seatings)
    launch(1, [(0, RowKind.PREFILL_LAST, 13, 7)], PROMPT[13:])
    launch(2, [(0, RowKind.DECODE, 20, 1)], [])
    launch(3, [], [], store=[(1, 0, page, page + 4) for page in (1, 2, 3)])
    launch(4, [], [], zero=[(0, page) for page in (1, 2, 3)])
    launch(5, [], [], load=[(2, 0, page + 20, page + 4) for page in (1, 2, 3)])
    pages = [(0, index, page) for index, page in enumerate((21, 22, 23, 4))]
    seatings = [tools.make_seating(0, PROMPT, generated=tokens[:])]
    launch(6, [(0, RowKind.PREFILL_LAST, 21, 1)], tokens[-1:], seated=[0], pages=pages, seatings=seatings)
    for step in range(5):
        launch(7 + step, [(0, RowKind.DECODE, 22 + step, 1)], [])
    runner.close()
    assert len(tokens) == 8
    with torch.inference_mode():
        logits = oracle(torch.tensor([PROMPT + tokens]), use_cache=False).logits[0]
    assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens
    assert runner.info.kv_bytes == (runner.info.num_kv_blocks + 1) * runner.info.block_size * 2 * (16 + 8) * 4

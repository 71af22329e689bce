# SPDX-License-Identifier: Apache-2.0
"""What the service says about the model, the server and their load. Knows the messages of the service."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto import tokenspeed_scheduler_pb2 as scheduler_pb2

from tokenspeed import __version__
from tokenspeed.llm.sampling import default_sampling
from tokenspeed.server.load import LoadMeter
from tokenspeed.server.probes import ModelFacts, ServerFacts
from tokenspeed.server.served import Served

_GIB = 2**30


def model_info(served: Served) -> Any:
    """GetModelInfoResponse. There is no tokenizer path: whoever needs the files asks for them."""
    llm, facts = served.llm, ModelFacts.of(served)
    architectures = llm.source.config.get("architectures")
    return scheduler_pb2.GetModelInfoResponse(
        model_path=facts.model_path,
        served_model_name=facts.served_model_name,
        model_type=facts.model_type,
        architectures=architectures if isinstance(architectures, list) else [],
        max_context_length=facts.max_context_length,
        max_req_input_len=facts.max_req_input_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=_eos_ids(served),
        bos_token_id=llm.tokenizer.bos_id or 0,
        default_sampling_params_json=msgspec.json.encode(default_sampling(llm.source)).decode(),
        model_dtype=facts.model_dtype,
    )


def server_info(served: Served, meter: LoadMeter) -> Any:
    """GetServerInfoResponse."""
    facts, stats = ServerFacts.of(served, meter), served.llm.stats
    limits = {"max_total_num_tokens": facts.max_total_num_tokens, "max_req_input_len": facts.max_model_len - 1}
    return scheduler_pb2.GetServerInfoResponse(
        server_args=ParseDict(msgspec.structs.asdict(facts), Struct()),
        scheduler_info=ParseDict(limits, Struct()),
        active_requests=stats.num_running + stats.num_waiting,
        is_paused=False,
        uptime_seconds=max(0.0, time.time() - served.created),
        max_total_num_tokens=facts.max_total_num_tokens,
        tokenspeed_version=facts.version,
        start_time=Timestamp(seconds=served.created),
        constrained_decoding="requested",
    )


def loads(served: Served, meter: LoadMeter, include: list[str]) -> Any:
    """GetLoadsResponse with the sections that were asked for; none asks for the core alone."""
    load = meter.read()
    one = scheduler_pb2.SchedulerLoad(dp_rank=0, active_token_usage=load.token_usage, **msgspec.structs.asdict(load))
    if {"memory", "all"} & set(include):
        one.memory.kv_cache_gb = served.llm.info.kv_bytes / _GIB
        one.memory.token_capacity = load.max_total_num_tokens
    if {"queues", "all"} & set(include):
        one.queues.waiting = load.num_waiting_reqs
    aggregate = scheduler_pb2.AggregateMetrics(
        total_running_reqs=load.num_running_reqs,
        total_waiting_reqs=load.num_waiting_reqs,
        total_reqs=load.num_total_reqs,
        avg_token_usage=load.token_usage,
        avg_throughput=load.gen_throughput,
        avg_utilization=load.utilization,
    )
    now = Timestamp()
    now.GetCurrentTime()
    return scheduler_pb2.GetLoadsResponse(
        timestamp=now.ToJsonString(), version=__version__, dp_rank_count=1, loads=[one], aggregate=aggregate
    )


def _eos_ids(served: Served) -> list[int]:
    """The tokenizer's end-of-sequence id and those of the model's generation settings."""
    own, listed = served.llm.tokenizer.eos_id, served.llm.source.generation_config.get("eos_token_id")
    ids = [] if own is None else [own]
    ids += [listed] if isinstance(listed, int) else listed if isinstance(listed, list) else []
    return list(dict.fromkeys(ids))

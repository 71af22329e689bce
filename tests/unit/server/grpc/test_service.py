# SPDX-License-Identifier: Apache-2.0
"""Everything of the service but Generate: health, facts, loads, the tokenizer, cache events, keys, reflection."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import tokenspeed_scheduler_pb2 as pb2
from smg_grpc_proto.generated import common_pb2

from fakes import EOS, FakeWorker, engine_info
from tokenspeed.core.config import CacheConfig, ServerConfig
from tokenspeed.core.ipc import WatchCache
from tokenspeed.core.plan import KvEvents
from tokenspeed.server.grpc.service import SERVICE_NAME
from unit.server.conftest import wait_until
from unit.server.grpc.conftest import MODEL_NAME, StartWorker, Worker


def code_of(call: Any) -> grpc.StatusCode:
    """What a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()


def test_health_is_told_by_both_services(start_worker: StartWorker) -> None:
    engine = FakeWorker()
    worker = start_worker(engine)
    checks = health_pb2_grpc.HealthStub(worker.channel)
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    status = health_pb2.HealthCheckResponse
    assert worker.stub.HealthCheck(pb2.HealthCheckRequest(), timeout=30).healthy
    wait_until(lambda: checks.Check(request, timeout=30).status == status.SERVING)
    engine.crash.set()
    wait_until(lambda: checks.Check(request, timeout=30).status == status.NOT_SERVING)
    answer = worker.stub.HealthCheck(pb2.HealthCheckRequest(), timeout=30)
    assert not answer.healthy
    assert "engine" in answer.message


def test_reflection_lists_the_services(worker: Worker) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(worker.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=30)
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= {each.name for each in answer.list_services_response.service}


def test_the_model_is_described(worker: Worker) -> None:
    info = worker.stub.GetModelInfo(pb2.GetModelInfoRequest(), timeout=30)
    assert info.served_model_name == info.model_path == MODEL_NAME
    assert info.tokenizer_path == ""
    assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (512, 511, 260)
    assert list(info.eos_token_ids) == [EOS]
    assert json.loads(info.default_sampling_params_json) == {}
    assert not info.supports_multimodal


def test_the_server_is_described(worker: Worker) -> None:
    info = worker.stub.GetServerInfo(pb2.GetServerInfoRequest(), timeout=30)
    assert info.max_total_num_tokens == info.scheduler_info["max_total_num_tokens"] == 32 * 16
    assert info.server_args["block_size"] == 16
    assert info.start_time.seconds > 1_700_000_000
    assert info.tokenspeed_version


def test_loads_have_the_sections_that_were_asked_for(start_worker: StartWorker) -> None:
    engine = FakeWorker(info=engine_info(num_kv_blocks=64))
    worker = start_worker(engine)
    gate = threading.Event()
    engine.runner.pace = lambda: gate.wait(0.02) and None
    call = worker.generate(stream=True, sampling={"max_new_tokens": 400})
    next(call)
    wait_until(lambda: worker.llm.stats.num_running == 1)
    core = worker.stub.GetLoads(pb2.GetLoadsRequest(), timeout=30)
    everything = worker.stub.GetLoads(pb2.GetLoadsRequest(include=["core", "memory", "queues"]), timeout=30)
    call.cancel()
    (load,) = core.loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.max_running_requests) == (1, 0, 64)
    assert load.num_used_tokens == 16
    assert load.token_usage == load.active_token_usage == 1 / 64
    assert core.aggregate.total_reqs == 1
    assert not load.HasField("memory")
    assert everything.loads[0].memory.token_capacity == 64 * 16
    assert everything.loads[0].HasField("queues")


def test_the_tokenizer_comes_in_pieces_with_its_fingerprint(worker: Worker) -> None:
    pieces = list(worker.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=30))
    data = b"".join(piece.data for piece in pieces)
    assert [piece.sha256 for piece in pieces] == [""] * (len(pieces) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert "{{ m.content }}" in json.loads(archive.read("tokenizer_config.json"))["chat_template"]


@pytest.mark.parametrize("name", ["StartProfile", "StopProfile"])
def test_there_is_no_profiler(worker: Worker, name: str) -> None:
    request = getattr(common_pb2, f"{name}Request")()
    assert code_of(lambda: getattr(worker.stub, name)(request, timeout=30)) is grpc.StatusCode.UNIMPLEMENTED


def test_the_cache_is_not_flushed_and_that_is_said(worker: Worker) -> None:
    answer = worker.stub.FlushCache(common_pb2.FlushCacheRequest(), timeout=30)
    assert not answer.success
    assert "restart" in answer.message


def test_a_key_is_asked_for_but_not_by_health_checks(start_worker: StartWorker) -> None:
    worker = start_worker(server=ServerConfig(api_key="secret"))

    def ask(**metadata: str) -> Any:
        return worker.stub.GetModelInfo(pb2.GetModelInfoRequest(), timeout=30, metadata=tuple(metadata.items()))

    assert code_of(ask) is grpc.StatusCode.UNAUTHENTICATED
    assert code_of(lambda: ask(authorization="Bearer other")) is grpc.StatusCode.UNAUTHENTICATED
    assert code_of(lambda: list(worker.generate())) is grpc.StatusCode.UNAUTHENTICATED
    assert not worker.submits()
    assert ask(authorization="Bearer secret").vocab_size == 260
    assert worker.stub.HealthCheck(pb2.HealthCheckRequest(), timeout=30).healthy


def test_cache_events_flow_while_somebody_subscribes(start_worker: StartWorker) -> None:
    engine = FakeWorker()
    worker = start_worker(engine)
    call = worker.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=30)
    state = next(call)
    assert state.snapshot.count == 1
    assert state.events[0].HasField("cleared")
    assert [message.on for message in engine.received if isinstance(message, WatchCache)] == [True]
    row = [0, 0, 0, 1, 11, 1, 7, 2]
    engine.control.kv_events.append(KvEvents(np.array([row], np.int64), np.array([5, 6], np.int32)))
    change = next(call)
    assert change.sequence_number == state.sequence_number + 1
    (event,) = change.events
    assert [(each.block_hash, list(each.token_ids)) for each in event.stored.blocks] == [(11, [5, 6])]
    assert not event.stored.HasField("parent_block_hash")
    call.cancel()


def test_a_cache_without_prefixes_has_no_events(start_worker: StartWorker) -> None:
    worker = start_worker(cache=CacheConfig(events=True, prefix_caching=False))
    request = common_pb2.SubscribeKvEventsRequest()
    assert code_of(lambda: next(worker.stub.SubscribeKvEvents(request, timeout=30))) is grpc.StatusCode.UNIMPLEMENTED

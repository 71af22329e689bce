# SPDX-License-Identifier: Apache-2.0
"""The model as a gateway's worker: the service tokenspeed.grpc.scheduler.TokenSpeedScheduler, token ids in and out.

The gateway renders templates, detokenizes and parses replies, and keeps what it routes by: load and cached prefixes.
Needs the packages of the extra `grpc`, which nothing outside this folder imports.
"""

# SPDX-License-Identifier: Apache-2.0
# Read by llama.cpp's build right after its project(): leaves out the part that only its programs use, half the work.
set(LLAMA_BUILD_COMMON OFF)

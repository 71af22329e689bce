// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
NB_MODULE(_cpu, module) { module.doc() = "cpu"; }

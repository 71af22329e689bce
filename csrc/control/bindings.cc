// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
NB_MODULE(_control, module) { module.doc() = "control"; }

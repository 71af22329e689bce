// SPDX-License-Identifier: Apache-2.0
#include "trace.h"

#include <variant>

namespace tokenspeed::control::sim {

namespace {

void print(std::ostream& out, const Submit& submit) {
  out << "submit " << submit.key << " prompt " << submit.token_ids.size() << " max_new " << submit.max_new_tokens;
  if (submit.min_new_tokens > Tokens(0)) {
    out << " min_new " << submit.min_new_tokens;
  }
  if (submit.priority != 0) {
    out << " priority " << submit.priority;
  }
  if (submit.match_limit) {
    out << " match_limit " << *submit.match_limit;
  }
  if (submit.retain) {
    out << " retain " << submit.retain->session << " ttl " << submit.retain->ttl_ms << " priority "
        << submit.retain->priority;
  }
  if (submit.deadline_ms) {
    out << " deadline " << *submit.deadline_ms;
  }
  if (submit.draft_width > 0) {
    out << " drafts " << submit.draft_width;
  }
  if (submit.remote != Remote::kNone) {
    out << (submit.remote == Remote::kReceive ? " receive" : " send");
  }
  if (!submit.spans.empty()) {
    out << " spans " << submit.spans.size();
  }
  if (!submit.name_space.empty() || !submit.adapter.empty()) {
    out << " in " << submit.name_space << '/' << submit.adapter;
  }
}

void print(std::ostream& out, const Cancel& cancel) { out << "cancel " << cancel.key; }

void print(std::ostream& out, const Finish& finish) {
  out << "finish " << finish.key << " keep " << finish.keep_tokens;
}

void print(std::ostream& out, const Retain& retain) {
  out << "retain " << retain.key << " until " << retain.deadline_ms;
}

void print(std::ostream& out, const Release& release) { out << "release " << release.key; }

void print(std::ostream& out, const TransferDone& done) {
  out << "transfer " << done.lease << (done.ok ? " done" : " failed");
}

void print(std::ostream& out, const Tick& tick) { out << "tick " << tick.now_ms; }

template <std::size_t Width>
void print_rows(std::ostream& out, const char* name, const FlatBuffer<Width>& buffer) {
  for (std::size_t index = 0; index < buffer.num_rows(); ++index) {
    out << (index == 0 ? std::string("  ") + name + ":" : std::string(",")).c_str();
    for (const std::int32_t value : buffer.row(index)) {
      out << ' ' << value;
    }
  }
}

}  // namespace

void trace_config(std::ostream* out, const Layout& layout) {
  if (out == nullptr) {
    return;
  }
  const Config& config = layout.config();
  *out << "config: " << config.num_partitions << " partitions x " << config.max_num_seqs << " seats, "
       << config.max_num_batched_tokens << " tokens a step, "
       << config.max_num_mixed_prefill_tokens.value_or(config.max_num_batched_tokens)
       << " of prompts where it decodes, in units of " << config.mixed_step_unit.value_or(0) << ", "
       << config.max_model_len << " at most, cache " << (config.prefix_caching ? "on" : "off") << ", stores on "
       << (config.host_store == HostStore::kOnSeal ? "seal" : "pressure") << '\n';
  for (const GroupSpec& spec : config.groups) {
    const char* kind = spec.kind == GroupKind::kFull     ? "full"
                       : spec.kind == GroupKind::kWindow ? "window"
                                                         : "recurrent";
    *out << "  " << kind << ": " << spec.num_blocks << " x " << spec.block_size << ", host " << spec.num_host_blocks;
    if (spec.kind == GroupKind::kWindow) {
      *out << ", window " << spec.window;
    }
    *out << '\n';
  }
}

void trace_events(std::ostream* out, std::int64_t round, std::span<const Event> events) {
  if (out == nullptr) {
    return;
  }
  for (const Event& event : events) {
    *out << round << ": ";
    std::visit([&](const auto& happened) { print(*out, happened); }, event);
    *out << '\n';
  }
}

void trace_plan(std::ostream* out, std::int64_t round, const StepPlan* plan) {
  if (out == nullptr) {
    return;
  }
  *out << round << ": plan ";
  if (plan == nullptr) {
    *out << "none\n";
    return;
  }
  *out << plan->step_id;
  print_rows(*out, "seated", plan->seated);
  print_rows(*out, "rows", plan->rows);
  print_rows(*out, "pages", plan->page_delta);
  print_rows(*out, "load", plan->load);
  print_rows(*out, "store", plan->store);
  *out << '\n';
}

void trace_result(std::ostream* out, std::int64_t round, const DeviceStep& step) {
  if (out == nullptr) {
    return;
  }
  *out << round << ": result " << step.step_id << (step.fault ? " fault" : "");
  for (const RowResult& row : step.rows) {
    *out << "  " << row.key << (row.fault ? " fault" : "") << " +" << row.token_ids.size();
  }
  *out << '\n';
}

}  // namespace tokenspeed::control::sim

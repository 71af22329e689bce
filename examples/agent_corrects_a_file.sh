#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# An agent corrects a file by tool calls: tokenspeed serve qwen2.5-coder-1.5b; pip install mini-swe-agent==2.4.6
set -euo pipefail
url=${1:-http://127.0.0.1:8000} model=${2:-qwen2.5-coder-1.5b}
cd "$(mktemp -d)"
printf 'def greet(name):\n    return "Helo, " + name\n' >greet.py
printf 'from greet import greet\n\nassert greet("Ada") == "Hello, Ada"\nprint("passed")\n' >test_greet.py
cp greet.py before.py
cat >agent.yaml <<'END'
agent:
  system_template: You are a programmer. You act by calling the function bash, once in each reply.
  instance_template: |
    {{task}}

    First call bash with "cat greet.py", then call bash with a sed -i command that corrects the file.
  step_limit: 8
  cost_limit: 0
environment:
  env: {PAGER: cat}
model:
  observation_template: |
    {{output.output}}(exit code {{output.returncode}})
    {% if n_model_calls == 1 %}The word is in the file. Call bash with a sed -i command that corrects it.
    {% elif n_model_calls == 2 %}The file is changed. Now call bash with "python3 test_greet.py".
    {% else %}When the test has passed, call bash with "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT".{% endif %}
  format_error_template: Call the function bash.
  model_kwargs: {temperature: 0, max_tokens: 100}
END
export OPENAI_API_KEY=any MSWEA_CONFIGURED=1 MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True
mini -m "openai/$model" -t 'greet.py prints "Helo" where it should print "Hello". Correct the file.' \
  -y --exit-immediately -l 0 -o trajectory.json -c agent.yaml -c "model.model_kwargs.api_base=$url/v1" </dev/null
diff -u before.py greet.py || true
python3 test_greet.py

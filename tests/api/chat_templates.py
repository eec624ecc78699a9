"""Chat templates of families, cut to what tells them, and of none."""

from __future__ import annotations

LOOP = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "{% endfor %}{% endfor %}"
JSON = "{{ f.arguments | tojson }}"
HERMES = LOOP + '<tool_call>{"name": "{{ f.name }}", "arguments": ' + JSON + "}</tool_call>" + END
QWEN3 = HERMES + "{% if enable_thinking is false %}<think></think>{% endif %}"
QWEN_CODER = (
    LOOP
    + "<tool_call><function={{ f.name }}>{% for k, v in f.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>"
    + "{% endfor %}</function></tool_call>"
    + END
)
GLM = (
    LOOP
    + "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    + "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call></think>"
    + END
)
LLAMA = (
    '<|start_header_id|>Answer with {"name": function name, "parameters": dictionary of argument name and its value}.'
    + LOOP
    + JSON
    + END
)
MISTRAL = LOOP + "[TOOL_CALLS]{{ f.name }}[ARGS]" + JSON + END
MAGISTRAL = MISTRAL + "[THINK][/THINK]"
DEEPSEEK = (
    "{% for m in messages %}{% if m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    + "{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}{% endfor %}{% else %}"
    + "{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
)
HARMONY = LOOP + "<|channel|>analysis<|channel|>commentary to=functions.{{ f.name }}<|message|>" + JSON + END
PYTHONIC = "[func_name1(params_name1=params_value1, …)]" + LOOP + JSON + END
GRANITE = (
    "<|start_of_role|>system<|end_of_role|>Answer with <|tool_call|> followed by a JSON list of tools used."
    + LOOP
    + '<|tool_call|>[{"name": "{{ f.name }}", "arguments": '
    + JSON
    + "}]"
    + END
)
GRANITE_THINKS = GRANITE + "Here is my thought process: … Here is my response:"
GRANITE4 = "<|start_of_role|>" + HERMES
# As published: what it joins to its marks has to be text.
PHI4_MINI = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.tools %}{{ '<|tool|>' + m.tools + '<|/tool|>' }}{% endif %}{% endfor %}"
)
NEMOTRON = (
    LOOP + '<TOOLCALL>[{"name": "{{ f.name }}", "arguments": ' + JSON + "}]</TOOLCALL>" + END + "<think></think>"
)
COHERE = (
    LOOP
    + '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": '
    + JSON
    + "}]<|END_ACTION|>"
    + END
    + "<|START_THINKING|>{{ plan }}<|END_THINKING|>"
)
SEED = QWEN_CODER.replace("tool_call>", "seed:tool_call>") + "{% set begin = '<seed:think>' %}{{ begin }}</seed:think>"
OLMO3 = (
    "{% for m in messages %}{{ m.content }}{% if m.function_calls %}<function_calls>{{ m.function_calls }}"
    "</function_calls>{% endif %}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}{# </think> #}"
)
MINICPM = (
    LOOP + "<|thought_start|>{{ m.thought }}<|thought_end|><|tool_call_start|>```python\n{{ f.name }}("
    "{% for k, v in f.arguments.items() %}{{ k }}={{ v }}{% endfor %})\n```<|tool_call_end|>" + END
)
MINIMAX = (
    LOOP
    + '<minimax:tool_call><invoke name="{{ f.name }}">{% for k, v in f.arguments | items %}<parameter name="{{ k }}">'
    + "{{ v }}</parameter>{% endfor %}</invoke></minimax:tool_call>"
    + END
    + "{{ messages[-1].content.split('</think>') | last }}"
)
INTERNLM = (
    LOOP + '<|action_start|><|plugin|>\n{"name": "{{ f.name }}", "parameters": ' + JSON + "}<|action_end|>" + END
)
GLM4 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n# 可用工具{% for t in tools %}\n\n## {{ t.function.name }}\n\n"
    "{{ t.function | tojson(indent=4) }}{% endfor %}{% endif %}{% for m in messages %}"
    "{% set said = m.content.split('</think>')[-1] %}{% if m.role == 'assistant' %}<|assistant|>"
    "{{ m.get('metadata', '') }}\n{{ said }}{% elif m.role in ('system', 'user', 'observation') %}"
    "<|{{ m.role }}|>\n{{ said }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GLM4_OF_2024 = (
    "[gMASK]<sop>{% for m in messages %}{% if m['tools'] is defined %}<|system|>\n# 可用工具"
    "{% set tools = m['tools'] %}{% for t in tools %}\n\n## {{ t['function']['name'] }}\n\n"
    "{{ t['function'] | tojson(indent=4) }}{% endfor %}{% endif %}{% if m['content'] %}"
    "<|{{ m['role'] }}|>{{ m['metadata'] }}\n{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COMMAND_R = (
    "{% for t in tools or [] %}```python\ndef {{ t.function.name }}(): pass\n```{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>{{ m.content }}{% if m.tool_calls %}"
    "\nAction:\n```json\n[\n{% for c in m.tool_calls %}    {\n        \"tool_name\": \"{{ c.function.name }}\",\n"
    "        \"parameters\": {{ c.function.arguments | tojson(indent=4) | indent(8) }}\n    }"
    "{{ '' if loop.last else ',\\n' }}{% endfor %}\n]```\n{% endif %}{% else %}<|{{ m.role | upper }}_TOKEN|>"
    "{{ m.content }}{% endif %}{% endfor %}<|CHATBOT_TOKEN|>"
)
EXAONE_DEEP = "{% for m in messages %}{{ m.content.split('</thought>')[-1] }}{% endfor %}"
TWO_FAMILIES = HERMES + "[TOOL_CALLS]"
PASTES = LOOP + "{{ f.arguments }}" + END
THINKS = "{% for m in messages %}{{ m.content }}{{ m.thinking }}{{ (m.tool_calls or []) | tojson }}{% endfor %}"
THINKS_OR_SAYS = (
    "{% for m in messages %}{{ raise_exception('both') if m.content and m.thinking }}{% endfor %}" + THINKS
)

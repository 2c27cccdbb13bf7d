"""Chat templates in the shapes of well-known families, written for tests; each uses what the family's own one uses."""

from __future__ import annotations

# roles in marks, tools as JSON, calls in marks, thinking cut off behind the last question (as Qwen 3)
_MARKED_TURNS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, seeking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.seeking and message.role == "user" and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.seeking = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {% generation %}{{- content.lstrip('\\n') }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# a beginning mark, headers, a date, and JSON with an indent (as Llama 3.1)
_HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- set text = message['content'] if message['content'] is string else message['content'] | string %}
        {{- text | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("single tool-calls at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is not string %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# a role's mark ends the turn before it, arguments one by one, a macro (as GLM 4.5)
_ROLES = """\
[gMASK]<sop>
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}
            {%- elif item is string -%}{{- item }}{%- endif -%}
        {%- endfor -%}
    {%- elif content is none -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif -%}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking
    and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}{{ '\\n<think>' + m.reasoning_content.strip() + '</think>'}}
{%- else %}{{ '\\n<think></think>' }}{%- endif %}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{%- for tc in m.tool_calls or [] %}
{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\\n<tool_call>' + tc.name }}
{% for k, v in tc.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- m.content }}{{- '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""

# marks with letters that are not ASCII, `is defined`, and text that is cut at a mark (as DeepSeek V3)
_WIDE = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_tool=false, is_first=true, system_prompt='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% set ns.system_prompt = ns.system_prompt ~ message['content'] %}{%- endif %}
{%- endfor %}
{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{'<｜User｜>' ~ message['content']}}{%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- if message.tool_calls %}
            {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
            {%- for tool in message['tool_calls'] %}
                {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] }}
                {{- '\\n```json\\n' ~ tool['function']['arguments'] ~ '\\n```<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
        {%- else %}
            {%- set content = message['content'] %}
            {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
            {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
        {%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor -%}
{% if add_generation_prompt %}{{'<｜Assistant｜>'}}{% endif %}
"""

# channels, a date, types written by recursive macros, loop controls, an error of its own (as gpt-oss)
_CHANNELS = """\
{%- macro render_type(spec) -%}
    {%- if spec.type == "object" -%}
        {{- "{\\n" }}
        {%- for name, each in (spec.properties or {}).items() -%}
            {{- "// " + each.description + "\\n" if each.description else "" }}
            {{- name }}{{ "?" if name not in (spec.required or []) else "" }}: {{ render_type(each) }}{{- ",\\n" }}
        {%- endfor -%}
        {{- "}" }}
    {%- elif spec.enum is defined and spec.enum -%}{{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- else -%}{{- spec.type|default('any') }}{%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") + "\\nReasoning: " }}
{{- reasoning_effort|default("medium") }}{{- "<|end|>" }}
{%- if tools -%}
    {{- "<|start|>developer<|message|># Tools\\nnamespace functions {\\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = (_: " + render_type(tool.parameters) }}
        {{- ") => any;\\n" }}
    {%- endfor %}
    {{- "}<|end|>" }}
{%- endif -%}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.tool_calls -%}
            {%- if message.thinking is defined %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {%- set tool_call = message.tool_calls[0].function %}
            {{- "<|start|>assistant to=functions." ~ tool_call.name ~ "<|channel|>commentary json<|message|>" }}
            {{- tool_call.arguments|tojson }}{{- "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- else -%}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif -%}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}
            {{- raise_exception("Message has tool role, but no assistant message with a tool call!") }}
        {%- endif %}
        {{- "<|start|>functions." + last_tool_call.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content|tojson }}{{- "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

# square brackets, JSON of all tools at once in order of names, documents (as Mistral and Cohere)
_BRACKETS = """\
{{- bos_token }}
{%- if tools %}
    {{- '[AVAILABLE_TOOLS]' ~ tools | tojson(sort_keys=true, separators=(',', ':')) ~ '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- if documents %}
    {%- for d in documents %}
        {{- '[DOCUMENT]' ~ d['title'] | upper ~ ': ' ~ d['text'] | replace('\\n', ' ') }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if message.content is not string %}
            {%- set message = dict(message, content=message.content | map(attribute='text') | join(' ')) %}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '[TOOL_CALLS]' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson(ensure_ascii=True) }}{%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- message.content | trim }}{% if not loop.last %}{{ eos_token }}{% endif %}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content[:1000] + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

FAMILIES = {
    "marked turns": _MARKED_TURNS,
    "headers": _HEADERS,
    "roles": _ROLES,
    "wide": _WIDE,
    "channels": _CHANNELS,
    "brackets": _BRACKETS,
}

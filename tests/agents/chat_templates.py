"""Chat templates in the formats of the cards' families, whole conversations with tools, written for the tests."""

from __future__ import annotations

from dataclasses import dataclass

from slimectl.checkpoints.create import CHATML


@dataclass(frozen=True)
class Family:
    """A family's format: its template, the token that ends the policy's turn, the one behind calls, and others."""

    template: str
    end: str
    end_of_calls: str = ""
    special: tuple[str, ...] = ()
    cards: str = ""
    """Beginnings of the names of its cards."""
    calls: int = 2
    """Most calls of one answer; 0 where the format has none."""
    says_and_calls: bool = True
    """Whether an answer may have text and calls."""
    shows_answers: bool = True
    """Whether an answer stands in the next prompt as the policy wrote it; reasoning may go."""


HEAD = "{% if tools %}<|im_start|>system\n# Tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
JSON_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
TAG_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n\n{% endif %}<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
IM_HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
FIRST_RESULT = "loop.first or messages[loop.index0 - 1].role != 'tool'"
LAST_RESULT = "loop.last or messages[loop.index0 + 1].role != 'tool'"


def im_template(calls: str, *, result: str, header: str = IM_HEADER, answer: str = "{{ m.content }}") -> str:
    """ChatML with tools in the system's message and results of tools in one message of the user."""
    return (
        HEAD + "{% for m in messages %}{% if m.role == 'tool' %}{% if " + FIRST_RESULT + " %}<|im_start|>user"
        "{% endif %}\n<tool_response>\n" + result + "\n</tool_response>"
        "{% if " + LAST_RESULT + " %}<|im_end|>\n{% endif %}"
        "{% elif m.role == 'assistant' %}<|im_start|>assistant\n" + answer + calls + "<|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + header
    )  # fmt: skip


LAST_QUERY = (
    "{% set ns = namespace(query=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
REASONED = (
    "{% if loop.index0 > ns.query and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
)
SMOLLM2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are SmolLM<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + IM_HEADER
)
GLM45 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if " + FIRST_RESULT + " %}<|observation|>{% endif %}\n<tool_response>\n"
    "{{ m.content }}\n</tool_response>{% elif m.role == 'assistant' %}<|assistant|>\n<think></think>"
    "{% if m.content %}\n{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}\n"
    "<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)  # fmt: skip
GLM4 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% elif m.role == 'assistant' %}"
    "{% for c in m.tool_calls or [] %}<|assistant|>{{ c.metadata or c.function.name }}\n"
    "{{ c.function.arguments | tojson }}{% else %}<|assistant|>\n{{ m.content }}{% endfor %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)  # fmt: skip
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{{ messages[0].content if messages[0].role == 'system' }}"
    "{% set ns = namespace(result=false) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.result = false %}"
    "<｜User｜>{{ m.content }}<｜Assistant｜>{% elif m.role == 'assistant' %}{% set ns.result = false %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}CALL"
    "{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}<｜end▁of▁sentence｜>{% elif m.role == 'tool' %}"
    "{% set ns.result = true %}RESULT{% endif %}{% endfor %}"
)
DEEPSEEK_V3 = DEEPSEEK.replace(
    "CALL",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{% if not loop.last %}\n{% endif %}",
).replace(
    "RESULT",
    "{% if " + FIRST_RESULT + " %}<｜tool▁outputs▁begin｜>{% else %}\n{% endif %}<｜tool▁output▁begin｜>{{ m.content }}"
    "<｜tool▁output▁end｜>{% if " + LAST_RESULT + " %}<｜tool▁outputs▁end｜>{% endif %}",
)
DEEPSEEK_V31 = DEEPSEEK.replace(
    "CALL",
    "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>",
).replace("RESULT", "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>")
DEEPSEEK_TOKENS = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>",
)  # fmt: skip
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n"
    "{{ m.content }}<|im_end|>{% elif m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if loop.first %}<|tool_calls_section_begin|>{% endif %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>"
    "{% if loop.last %}<|tool_calls_section_end|>{% endif %}{% endfor %}<|im_end|>{% else %}"
    "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
KIMI_TOKENS = (
    "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
)  # fmt: skip
MINIMAX = (
    "]~!b[]~b]system\n{{ messages[0].content if messages[0].role == 'system' }}{{ tools | tojson if tools }}[e~[\n"
    "{% for m in messages %}{% if m.role == 'user' %}]~b]user\n{{ m.content }}[e~[\n{% elif m.role == 'tool' %}"
    "{% if " + FIRST_RESULT + " %}]~b]tool{% endif %}\n<response>{{ m.content }}</response>"
    "{% if " + LAST_RESULT + " %}[e~[\n{% endif %}{% elif m.role == 'assistant' %}]~b]ai\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if loop.first %}\n<minimax:tool_call>\n{% endif %}"
    '<invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n'
    "{% if loop.last %}</minimax:tool_call>{% endif %}{% endfor %}[e~[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)  # fmt: skip
LLAMA3 = (
    "<|begin_of_text|>{% set ns = namespace(declared=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>{% elif m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>{% else %}'
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'user' and tools and not ns.declared %}{% set ns.declared = true %}"
    "Answer with name and dictionary of argument name and its value: {{ tools | tojson }}\n\n{% endif %}"
    "{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GLM_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
THINK_TOKENS = ("<think>", "</think>")
IM_END = "<|im_end|>"
FAMILIES = {
    "tiny": Family(CHATML, IM_END, cards="tiny", calls=0),
    "smollm2": Family(SMOLLM2, IM_END, calls=0),
    "qwen2.5": Family(im_template(JSON_CALLS, result="{{ m.content }}"), IM_END, cards="qwen2.5 mimo"),
    "qwen3": Family(
        LAST_QUERY + im_template(JSON_CALLS, result="{{ m.content }}", answer=REASONED), IM_END, cards="qwen3-"
    ),
    "qwen3.5": Family(
        LAST_QUERY
        + im_template(
            TAG_CALLS,
            result="{{ m.content }}",
            answer=REASONED,
            header="{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        ),
        IM_END,
        special=THINK_TOKENS,
        cards="qwen3.5",
        shows_answers=False,
    ),
    "glm4.5": Family(GLM45, "<|user|>", "<|observation|>", GLM_TOKENS, cards="glm4.5 glm4.7 glm5"),
    "glm4": Family(GLM4, "<|user|>", "<|observation|>", GLM_TOKENS, cards="glm4-", calls=1, says_and_calls=False),
    "deepseek-v3": Family(DEEPSEEK_V3, "<｜end▁of▁sentence｜>", special=DEEPSEEK_TOKENS, cards="deepseek-v3"),
    "deepseek-v3.1": Family(DEEPSEEK_V31, "<｜end▁of▁sentence｜>", special=DEEPSEEK_TOKENS),
    "kimi-k2": Family(KIMI, IM_END, special=KIMI_TOKENS, cards="kimi-k2 moonlight"),
    "minimax-m2": Family(MINIMAX, "[e~[", special=("]~!b[", "]~b]"), cards="minimax-m2", shows_answers=False),
    "llama3": Family(
        LLAMA3, "<|eot_id|>", special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        cards="llama3", calls=1, says_and_calls=False,
    ),
}  # fmt: skip

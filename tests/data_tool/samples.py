"""Tiny tokenizers, chat templates and conversations."""

CHATML = ("{% for m in messages %}"
          "{% if m['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + m['role']) }}"
          "{% endif %}<|im_start|>{{ m['role'] }}\n"
          "{% if m['role'] == 'assistant' %}BEGIN{{ m['content'] }}<|im_end|>END{{ '\n' }}"
          "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TEMPLATES = {
    "plain": CHATML.replace("BEGIN", "").replace("END", ""),
    "marked": CHATML.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}"),
    # The last turn gets an empty block of thoughts, earlier ones do not (as Qwen3's template).
    "thinking": CHATML.replace("BEGIN", "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}").replace("END", ""),
    # Earlier turns are shortened: their tokens cannot be told.
    "rewriting": CHATML.replace("BEGIN", "{% if not loop.last %}(old) {% endif %}").replace("END", ""),
}


def save_tokenizer(folder, template=TEMPLATES["plain"], eos="<|im_end|>"):
    """A byte-level tokenizer without merges: every ASCII character is one token, special tokens are one each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos,
                                   additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    if template:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def chat(*contents):
    """Alternating user and assistant messages."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]}

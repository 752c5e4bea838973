"""Words of texts for the tokenizers of GGUF files: the meaning of ``tokenizer.ggml.pre``.

The regular expressions are those of the models' own tokenizers. llama.cpp has the same words in
another form; where it only approximates them, as in texts with combining marks, ids may differ.
"""

from baton.model.hf_tokens import LOWER, TEKKEN, UPPER

# Words of GPT-2, then of GPT-4 and its descendants, which split digits differently.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_TAIL = rf"{_SIGNS}|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
DIGIT = r"\p{N}"
_ASCII_SIGN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_HAN = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK3 = (
    rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CASED = (  # letters with two cases, as of Unicode 11
    r"\s?["
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ"
    "\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
    "]+"
)
_DEEPSEEK_SIGNS = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"
_SENTENCE = " ?[^(\\s|.,!?…。，、।۔،)]+"

_LLAMA3_NAMES = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
_CUTS: dict[str, tuple[str, ...]] = {
    """
    gpt-2 phi-2 olmo jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code gigachat
    a.x-4.0 mellum modern-bert roberta-bpe mpt jais trillion granite-docling exaone4
    """: (GPT2,),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (DIGIT, GPT2),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    _LLAMA3_NAMES: (_LLAMA3,),
    "dbrx smaug-bpe chatglm-bpe glm4 glm5": (_LLAMA3,),
    """
    qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan solar-open grok-2 kormo f2llmv2
    """: (_QWEN2,),
    "qwen35": (_QWEN35,),
    "ufakzeka": (rf"{_WORDS}|\p{{N}}|{_TAIL}",),
    "minicpm5": (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}+|{_TAIL}"),
    "seed-coder": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    "tekken": (TEKKEN,),
    "gpt-4o llama4 kanana2 talkie minimax-m2": (_GPT4O,),
    "deepseek-llm": (r"[\r\n]", _CASED, _DEEPSEEK_SIGNS, r"\s+$", _HAN, r"\p{N}+"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, DIGIT),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "poro-chat bloom gpt3-finnish": (_SENTENCE,),
    "viking": (_SENTENCE, DIGIT),
}
CUTS = {name: cuts for names, cuts in _CUTS.items() for name in names.split()}
"""Regular expressions that cut a text one after another, by ``tokenizer.ggml.pre``."""
BEGINS = frozenset((*_LLAMA3_NAMES.split(), "tekken"))
"""Pre-tokenizers of models that need a BOS token, also if the file has no flag."""
WHOLE_WORD_FIRST = {*BEGINS, "glm4", "glm5", "minicpm5"}
"""Pre-tokenizers of models in which a word that is a token needs no merges."""
NFC = {"qwen2", "deepseek-r1-qwen"}
"""Pre-tokenizers of models that read texts in Unicode's composed form."""
BY_TOKEN = {
    (128_000, "<|begin_of_text|>"): "llama-bpe",
    (151_643, "<|endoftext|>"): "qwen2",
    (100_000, "<｜begin▁of▁sentence｜>"): "deepseek-llm",
    (32_013, "<｜begin▁of▁sentence｜>"): "deepseek-coder",
}
"""Pre-tokenizers of vocabularies whose early files do not name one."""

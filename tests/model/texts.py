"""Text that tokenizers get wrong: code, digits, emoji, Chinese, whitespace, control."""

UNUSUAL_DIGITS = "x² ½ ٣٤"
TEXTS = [
    "The quick brown fox, isn't it? They'LL say we've 'd it.",
    "def f(x):\n\treturn x ** 2  # square\n\n\n    if (a != b && c[0] == '\\n'): pass",
    "1 22 333 4444 1234567890 3.14159 1,000,000 a1 1b 一二三",
    UNUSUAL_DIGITS,
    "🙂 👩‍👩‍👧‍👦 🇨🇭 naïve café \u0065\u0301 Ångström",
    "你好，世界！今天天气很好。 日本語のテキスト 한국어",
    " leading  double   triple\t\ttabs\r\nwindows \n \n trailing   ",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><not special>",
    "\x00\x01\ufffd\u200b\u00a0|",
    "",
]

"""A thousand strings that no grader should evaluate, hang on, or choke on."""

import itertools
import random

CANARY = "burnish-grader-canary"


def hostile_strings(canary, count=1000, seed=0):
    """Of all the kinds below in turn; the code payloads would write the file ``canary``."""
    draw = random.Random(seed)
    kinds = [_power, _factorial, _nested, _long, _unicode, _payload, _latex, _malformed, _slow]
    return [kind(draw, canary) for kind in itertools.islice(itertools.cycle(kinds), count)]


def _power(draw, _):
    a, b, c = (draw.randint(2, 10 ** draw.randint(1, 12)) for _ in range(3))
    return draw.choice(
        [
            "9**9**9",
            f"{a}**{b}**{c}",
            f"{a}^{{{b}^{{{c}}}}}",
            f"{a}^{{{b}}}",
            f"({a}^{b})^{{{c}}}",
            f"{a}^{{-{b}}}+1",
            f"x^{{{a}^{{{b}}}}}",
            f"(x+{a})^{{{draw.randint(1000, 99999)}}}",
            f"1e{b}",
            f"{a}e-{b}",
            f"{a} \\times 10^{{{b}}}",
            "^".join(str(draw.randint(2, 9)) for _ in range(draw.randint(3, 300))),
            "{".join(["9^"] * 200) + "9" + "}" * 199,
            f"\\sqrt[{a}]{{{b}^{{{c}}}}}",
            f"0.{'0' * 500}1^{{{a}}}",
        ]
    )


def _factorial(draw, _):
    n = 10 ** draw.randint(3, 12)
    return draw.choice(
        [
            f"{n}!",
            f"({n}!)!",
            "9!!!!!!",
            "((9!)!)!",
            f"\\binom{{{n}}}{{{n // 2}}}",
            f"\\frac{{{n}!}}{{{n - 1}!}}",
            f"(99!)^{{{n}}}",
            f"9999!^{{9999}}+{n}",
            f"(n+{n})!",
        ]
    )


def _nested(draw, _):
    n = draw.choice([10, 25, 100, 400, 2000, 30_000])
    some = [("(", ")"), ("{", "}"), ("[", "]"), ("\\sqrt{", "}"), ("\\frac{1}{1+", "}"), ("|", "|")]
    more = [("\\left(", "\\right)"), ("\\{", "\\}"), ("-(", ")"), ("\\sin(", ")"), ("x^{", "}")]
    left, right = draw.choice([*some, *more])
    return left * n + draw.choice(["1", "x", "x+1", ""]) + right * draw.choice([n, n - 1, 0])


def _long(draw, _):
    n = draw.choice([2_001, 99_000, 1_000_000])
    return draw.choice(["9", "x+", "1,", "(", "\\", "$", "\\frac", " ", "a", "\\boxed{", "e"]) * n


def _unicode(draw, _):
    some = [
        "\ud800",
        "\u202e",
        "\u0000",
        "٣",
        "½",
        "𝟙",
        "é́́́",
        "‮",
        "﷽",
        "🙂",
        "²",
        "∞",
        "Ａ",
        "\u2028",
        "ﬁ",
    ]
    return "".join(
        draw.choice([*some, "1", "x", "+"]) for _ in range(draw.choice([1, 5, 50, 1999]))
    )


def _payload(draw, canary):
    command = f"touch {canary}"
    code = draw.choice(
        [
            f"__import__('os').system('{command}')",
            f"exec(\"import os; os.system('{command}')\")",
            f"eval(compile(\"open('{canary}','w')\", 'x', 'eval'))",
            f"open('{canary}', 'w').write('x')",
            f"(lambda: open('{canary}','w'))()",
            f"[c for c in ().__class__.__base__.__subclasses__()][0]; open('{canary}','w')",
            f"{{{{''.__class__.__mro__[1].__subclasses__()}}}} open('{canary}','w')",
            f"\\operatorname{{eval}}(open('{canary}','w'))",
            f"\\input{{|{command}}}",
            f"\\write18{{{command}}}",
            f"$({command})",
            f"`{command}`",
            f"1; {command}",
            f"x' + str(open('{canary}','w')) + '",
            f"Symbol('x').__class__(open('{canary}','w'))",
            f"f(open('{canary}','w'))",
        ]
    )
    around = [
        ("", ""),
        ("1+", ""),
        ("\\text{", "}"),
        ("$", "$"),
        ("\\frac{", "}{2}"),
        ("(", ", 2)"),
    ]
    before, after = draw.choice([*around, ("x_{", "}"), ("\\sqrt{", "}"), ("2^{", "}")])
    return before + code + after


def _latex(draw, _):
    n = 10 ** draw.randint(2, 9)
    return draw.choice(
        [
            f"\\sum_{{k=1}}^{{{n}}} k^{{k}}",
            f"\\prod_{{k=1}}^{{{n}}} k!",
            "\\int_0^1 x^{x^{x}} dx",
            "\\lim_{x \\to 0} \\frac{\\sin x}{x^{99}}",
            f"\\operatorname{{eye}}({n})",
            f"\\operatorname{{zeros}}({n},{n})",
            f"\\begin{{pmatrix}} {'1 & ' * 300}1 \\end{{pmatrix}}^{{{n}}}",
            "\\begin{pmatrix}" * 50,
            f"\\gcd({n}, {n - 1})",
            f"\\lfloor {n}.5 \\rfloor",
            "\\newcommand{\\x}{\\x\\x}\\x",
            "\\def\\x{\\x}\\x",
            f"{{{','.join(str(i) for i in range(300))}}}",
            f"({','.join(f'x+{i}' for i in range(60))})",
            f"\\{{{','.join(f'x^{i}' for i in range(60))}\\}}",
        ]
    )


def _malformed(draw, _):
    pieces = (
        "\\frac { } ( ) ^ _ \\ $ 1 x + - / = , & \\sqrt \\left \\text{ | ! % \\boxed{ < and ± ∪"
    )
    return "".join(draw.choice([*pieces.split(), " "]) for _ in range(draw.randint(1, 60)))


def _slow(draw, _):
    n = draw.randint(3, 40)
    roots = "+".join(f"\\sqrt{{{draw.randint(2, 999)}}}" for _ in range(n))
    return draw.choice(
        [
            f"\\sqrt{{{roots}}}",
            f"({roots})^{{{n}}}",
            "".join(f"(x+{draw.randint(1, 99)})" for _ in range(n)),
            f"\\sin(\\cos(\\tan(x)))^{{{n}}}",
            f"\\frac{{{roots}}}{{{roots}}}",
            "+".join(f"\\frac{{x^{{{i}}}}}{{y+{i}}}" for i in range(n)),
            "\\sqrt{x+" * min(n, 20) + "1" + "}" * min(n, 20),
            f"\\log_{{{n}}}({roots})",
        ]
    )

"""Charts as SVG, drawn on the server: no script, and no colour that is not the style sheet's."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

_WIDTH, _HEIGHT = 100.0, 6.0
_TALL = 40.0
_WORD = 12.0
"""So much of its axis a word takes at most, that of a telephone."""
_LEAST = 1.5
"""What is there at all is wide enough to be seen: three in doubt of a million."""


def bar(counts: Mapping[str, int]) -> Markup:
    """A bar with a part for each count, in its order; what it shows is said in words, too."""
    shown = {word: count for word, count in counts.items() if count}
    said = ", ".join(f"{count:,} {word}" for word, count in shown.items()) or "nothing"
    total = sum(shown.values())
    wide = {word: max(count / total * _WIDTH, _LEAST) for word, count in shown.items()}
    parts, left = [], 0.0
    for word, share in wide.items():
        width = share * _WIDTH / sum(wide.values())
        rect = Markup('<rect class="{}" x="{}" width="{}" height="{}"/>')
        parts.append(
            rect.format(word.replace(" ", "-"), f"{left:.2f}", f"{width:.2f}", f"{_HEIGHT:g}")
        )
        left += width
    return _picture("bar", said, _HEIGHT, parts)


def _picture(kind: str, said: str, height: float, parts: Sequence[Markup]) -> Markup:
    svg = Markup(
        '<svg class="{}" role="img" aria-label="{}" viewBox="0 0 {} {}" '
        'preserveAspectRatio="none">{}</svg>'
    )
    return svg.format(kind, said, f"{_WIDTH:g}", f"{height:g}", Markup("").join(parts))


def columns(series: Mapping[str, Sequence[int]], words: Sequence[str], said: str) -> Markup:
    """A column for each place of the series, one series above another, and below them the word of
    each place that has one, where there is room; `said` says it in words.
    """
    totals = [sum(counts) for counts in zip(*series.values(), strict=True)]
    tallest = max(totals, default=0) or 1
    width = _WIDTH / max(1, len(totals))
    parts: list[Markup] = []
    for index in range(len(totals)):
        top = _TALL
        for word, counts in series.items():
            height = counts[index] / tallest * _TALL
            if not height:
                continue
            top -= height
            rect = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>')
            x, w = f"{index * width:.2f}", f"{width * 0.9:.2f}"
            slug = word.replace(" ", "-")
            parts.append(rect.format(slug, x, f"{top:.2f}", w, f"{height:.2f}"))
    return _picture("columns", said, _TALL, parts) + _axis(words)


def _axis(words: Sequence[str]) -> Markup:
    """The words, each from the left of its column on. A picture of its own: that of the columns is
    stretched to the width of the screen, and letters would be, too.
    """
    parts = []
    for index, word in enumerate(words):
        at = index / len(words) * _WIDTH
        if not word or at > _WIDTH - _WORD:
            continue
        mark = Markup('<line x1="{0}%" x2="{0}%" y1="0" y2="4"/>').format(f"{at:.2f}")
        text = Markup('<text x="{}%" y="17">{}</text>')
        parts.append(mark + text.format(f"{at:.2f}", word))
    svg = Markup('<svg class="axis" aria-hidden="true">{}</svg>')
    return svg.format(Markup("").join(parts))

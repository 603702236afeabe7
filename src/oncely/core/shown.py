"""How what others have written is put before people."""


def shown(text: str) -> str:
    """`text` for a terminal or a page: what is no printable character is written out."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )

"""What is put on a terminal."""


def shown(text: str) -> str:
    """`text` as it can be put on a terminal: what is no printable character is written out."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )

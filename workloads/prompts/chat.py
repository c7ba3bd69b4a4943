"""Chat templates around prompts whose chunks stay as they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol, cast

from picbench.errors import ConfigError

ChatRule = Literal["auto", "on", "off"]

#: Stands for the context while a template is applied.
MARKER = "PICBENCH-CONTEXT-8C1F"

#: The date that templates get which print the day: prompts must not change overnight. It is the
#: one that Llama 3's own templates fall back to.
TODAY = datetime(2024, 7, 26)


class _ChatTokenizer(Protocol):
    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **extra: Any
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Chat:
    """The chat template of a tokenizer."""

    tokenizer: _ChatTokenizer

    def wrap(self, head: str, tail: str) -> tuple[str, str]:
        """Return the texts before and behind the context, in one turn of the user.

        The template sees the whole turn with a marker in place of the context, so that whatever
        it does to its ends (most strip white space) is done. Raises ConfigError where it fails or
        does something to the marker.
        """
        sides = self._render(head + MARKER + tail).split(MARKER)
        if len(sides) != 2:
            raise _error(f"shows a prompt's context {len(sides) - 1} times")
        return sides[0], sides[1]

    def _render(self, turn: str) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": turn}],
                    tokenize=False,
                    add_generation_prompt=True,
                    **_variables(),
                )
            )
        except Exception as error:  # A template is a program of somebody else's.
            raise _error(f"fails: {type(error).__name__}: {error}") from error


def find_chat(rule: ChatRule, tokenizer: object, *, wanted: bool) -> Chat | None:
    """Return the chat template to use, or None.

    ``auto`` uses one where the tokenizer has it and the data set wants it (`wanted`), ``on``
    with every data set, and then raises ConfigError where there is none.
    """
    has_one = bool(getattr(tokenizer, "chat_template", None))
    if rule == "on" and not has_one:
        raise ConfigError("`chat=on`: this tokenizer has no chat template", hint="`chat=auto`")
    if rule == "off" or not has_one or (rule == "auto" and not wanted):
        return None
    return Chat(cast(_ChatTokenizer, tokenizer))


def _variables() -> Mapping[str, Any]:
    """What templates may ask for beside the turn: a day, and whether to think before a reply.

    Replies are a few words long, which thinking would use up.
    """
    return {"strftime_now": TODAY.strftime, "enable_thinking": False}


def _error(problem: str) -> ConfigError:
    return ConfigError(f"`chat`: the tokenizer's chat template {problem}", hint="`chat=off`")

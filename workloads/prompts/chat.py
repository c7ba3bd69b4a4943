"""Chat templates around prompts, which leave the chunks unchanged."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from picbench.errors import ConfigError

ChatRule = Literal["auto", "on", "off"]

#: Placeholder of the context while a template is applied.
MARKER = "PICBENCH-CONTEXT-8C1F"

#: The date for templates that print the day, fixed so that prompts do not change overnight. It is
#: the default of Llama 3's own templates.
TODAY = datetime(2024, 7, 26)


@dataclass(frozen=True, slots=True)
class Chat:
    """The chat template of a tokenizer of `transformers`."""

    tokenizer: Any

    def wrap(self, head: str, tail: str) -> tuple[str, str]:
        """Return the texts before and after the context, as one user message.

        The template is applied to the whole message with a marker in place of the context, so that
        it can strip white space at the ends, as most do. Raises ConfigError where it fails or
        drops or repeats the marker.
        """
        sides = self._render(head + MARKER + tail).split(MARKER)
        if len(sides) != 2:
            raise _error(f"shows a prompt's context {len(sides) - 1} times")
        return sides[0], sides[1]

    def _render(self, message: str) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": message}],
                    tokenize=False,
                    add_generation_prompt=True,
                    strftime_now=TODAY.strftime,
                    enable_thinking=False,  # It would use up the few tokens of a reply.
                )
            )
        except Exception as error:  # A template is foreign code.
            raise _error(f"fails: {type(error).__name__}: {error}") from error


def find_chat(rule: ChatRule, tokenizer: object, *, wanted: bool) -> Chat | None:
    """Return the chat template to use, or None.

    ``auto`` uses the tokenizer's template, if any, for data sets that want one (`wanted`); ``on``
    uses it for every data set and raises ConfigError where there is none.
    """
    has_one = bool(getattr(tokenizer, "chat_template", None))
    if rule == "on" and not has_one:
        raise ConfigError("`chat=on`: this tokenizer has no chat template", hint="`chat=auto`")
    if rule == "off" or not has_one or (rule == "auto" and not wanted):
        return None
    return Chat(tokenizer)


def _error(problem: str) -> ConfigError:
    return ConfigError(f"`chat`: the tokenizer's chat template {problem}", hint="`chat=off`")

"""Cuts over-long prompts that SGLang would refuse, in the process that tokenizes.

SGLang refuses a prompt before it is queued (`TokenizerManager._validate_one_request`), or one a few
tokens shorter when it is queued (`validate_input_length`). Neither refuses a prompt cut here.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from impress_sglang.plugin.compat import config_of
from impress_sglang.plugin.report_transport import share
from impress_sglang.serving.custom_params import (
    KEEP_KEY,
    KEEP_TOKENS,
    TRUNCATED_KEY,
    check_custom_params,
    find_cut,
    recompute_ratio_of,
)

# Fields of a request that refer to positions of its prompt, or hold it in another form: such a
# request is not cut, and refused as usual.
_WHOLE = (
    *("input_embeds", "session_params", "positional_embed_overrides", "bootstrap_room"),
    *("multi_item_delimiter_indices", "token_indices_to_pool", "return_hidden_states"),
    *("return_routed_experts", "return_indexer_topk"),
)
_SYSTEM_ROLES = ("system", "developer")


def around_validation(
    original: Callable[..., None], manager: Any, obj: Any, input_ids: list[int] | None
) -> None:
    """Around `TokenizerManager._validate_one_request`: validate the prompt as it will be cut.

    Our parameters of the request are checked first.
    """
    cut = _cut_of(manager, obj, input_ids)
    original(manager, obj, _without(input_ids, cut))


def around_tokenized(
    original: Callable[..., Any],
    manager: Any,
    obj: Any,
    input_text: str,
    input_ids: list[int] | None,
    *arguments: Any,
) -> Any:
    """Around `TokenizerManager._create_tokenized_object`, which makes the scheduler's request.

    Token lists of callers of `sglang.Engine` are not changed.
    """
    if config_of(manager.server_args) is not None:
        share(obj)
    cut = _cut_of(manager, obj, input_ids)
    if cut is not None:
        _add_custom_params(manager, obj, {TRUNCATED_KEY: len(cut)})
    return original(manager, obj, input_text, _without(input_ids, cut), *arguments)


def keep_system_prompt(result: Any, chat: Any, request: Any, *_: Any, **__: Any) -> Any:
    """After `OpenAIServingChat._convert_to_internal_request`: keep the system prompt in a cut.

    Adds its length to the request, only if the prompt will be cut.
    """
    adapted, manager = result[0], chat.tokenizer_manager
    tokens = adapted.input_ids
    has_keep = KEEP_KEY in _custom_params(manager, adapted) or request.input_ids is not None
    if has_keep or not isinstance(tokens, list) or _cut_of(manager, adapted, tokens) is None:
        return result
    length = _system_tokens(chat, request, tokens)
    if length is not None:
        _add_custom_params(manager, adapted, {KEEP_KEY: length})
    return result


def _cut_of(manager: Any, obj: Any, input_ids: list[int] | None) -> range | None:
    """Return the tokens of a request to leave out, or None.

    Raises `ValueError` if its parameters are wrong.
    """
    config = config_of(manager.server_args)
    if config is None:
        return None
    custom = _custom_params(manager, obj)
    check_custom_params(custom, config)
    fraction = recompute_ratio_of(custom, config)
    if input_ids is None or fraction is None or not _can_be_cut(obj):
        return None
    # Most tokens that SGLang accepts in this prompt.
    room = int(manager.context_len) - manager.num_reserved_tokens
    limit, new_tokens = room - 1, obj.sampling_params.get("max_new_tokens")
    if manager.max_req_input_len is not None:
        limit = min(limit, manager.max_req_input_len - 1)
    if manager.validate_total_tokens and new_tokens is not None:
        limit = min(limit, room - new_tokens)
    keep = custom.get(KEEP_KEY, KEEP_TOKENS)
    return find_cut(input_ids, limit, fraction, keep, _openers(manager))


def _can_be_cut(obj: Any) -> bool:
    """Whether no field of a request refers to positions of its prompt."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    if not isinstance(obj, GenerateReqInput) or obj.contains_mm_input():
        return False
    reads_prompt = obj.return_logprob and (obj.logprob_start_len or 0) >= 0
    return not reads_prompt and not any(getattr(obj, field) for field in _WHOLE)


def _custom_params(manager: Any, obj: Any) -> dict[str, Any]:
    params = {**(manager.preferred_sampling_params or {}), **(obj.sampling_params or {})}
    custom = params.get("custom_params")
    return custom if isinstance(custom, dict) else {}


def _add_custom_params(manager: Any, obj: Any, more: dict[str, int]) -> None:
    """Add to a copy of a request's `custom_params`, which may be shared."""
    custom = {**_custom_params(manager, obj), **more}
    obj.sampling_params = {**obj.sampling_params, "custom_params": custom}


def _without(tokens: list[int] | None, cut: range | None) -> list[int] | None:
    if tokens is None or cut is None:
        return tokens
    return [*tokens[: cut.start], *tokens[cut.stop :]]


def _system_tokens(chat: Any, request: Any, tokens: list[int]) -> int | None:
    """Count the tokens of a chat's prompt before its conversation; None if unknown.

    These stay the same if another role begins the conversation, less the token with which messages
    begin.
    """
    from sglang.srt.entrypoints.openai.protocol import (
        ChatCompletionMessageGenericParam,
        ChatCompletionMessageUserParam,
    )

    roles = [message.role for message in request.messages]
    first = next((i for i, role in enumerate(roles) if role not in _SYSTEM_ROLES), len(roles))
    other: list[Any] = [ChatCompletionMessageUserParam(role="user", content="")]
    if roles[first : first + 1] != ["assistant"]:
        other.insert(0, ChatCompletionMessageGenericParam(role="assistant", content=""))
    probe = request.model_copy(
        update={"messages": [*request.messages[:first], *other], "continue_final_message": False}
    )
    try:
        probe_tokens = chat._process_messages(probe, False).prompt_ids
    except ValueError:
        # The template requires a user message first.
        return None
    pairs = enumerate(zip(tokens, probe_tokens, strict=False))
    length = next((i for i, (left, right) in pairs if left != right), None)
    if length and tokens[length - 1] in _openers(chat.tokenizer_manager):
        return length - (tokens[length - 1] in tokens[length:])
    return length


def _openers(manager: Any) -> Container[int]:
    """Return tokens that may begin a message: the added ones, which no plain text has."""
    return getattr(manager.tokenizer, "added_tokens_decoder", {})

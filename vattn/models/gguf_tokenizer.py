"""Build the tokenizer that a GGUF file describes.

| tokenizer.ggml.model | kind of vocabulary            | cut into words by                    |
|----------------------|-------------------------------|--------------------------------------|
| gpt2                 | bytes in GPT-2's spelling     | the regexes of `tokenizer.ggml.pre`  |
| llama                | SentencePiece's BPE, `▁` for a space | nothing: merges run over all of it |

Keys that are applied: the tokens, their types, merges or scores, the ids of bos, eos, unknown and padding,
add_bos_token, add_eos_token, add_space_prefix, and the chat template. Ids and flags that a file leaves
out are llama.cpp's. `unused_keys` lists what is left.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from vattn.errors import ConfigError, UnsupportedModel
from vattn.models.gguf_pretokenizers import NOT_BYTE_LEVEL, PRE_TOKENIZERS, PreTokenizer

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # of the token types
_SPACE = "▁"
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}  # where the file names none


# Keys that say nothing of text, or that the two kinds of vocabulary above have no use for.
_UNAFFECTING = frozenset(
    f"{_PREFIX}{name}"
    for name in """
    model pre tokens token_type scores merges bos_token_id eos_token_id eot_token_id eom_token_id
    unknown_token_id padding_token_id seperator_token_id mask_token_id cls_token_id add_bos_token
    add_eos_token add_space_prefix token_type_count add_sep_token fim_pre_token_id fim_suf_token_id
    fim_mid_token_id fim_pad_token_id fim_rep_token_id fim_sep_token_id prefix_token_id suffix_token_id
    middle_token_id
    """.split()  # noqa: SIM905
) | {"tokenizer.chat_template", "tokenizer.huggingface.json"}


def unused_keys(fields: dict[str, Any]) -> list[tuple[str, Any]]:
    """Keys of the tokenizer, with a value, that could change text or sampling and are not applied."""
    unused = [(k, v) for k, v in fields.items() if k.startswith("tokenizer.") and k not in _UNAFFECTING and v]
    prefix = _PREFIX + "add_space_prefix"
    if fields.get(_PREFIX + "model") == "gpt2" and fields.get(prefix):
        unused.append((prefix, True))
    return unused


def build_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer described by a file's `fields` (`GgufSummary.fields`).

    Raises UnsupportedModel, with key and value, for a kind of vocabulary or a pre-tokenizer that is not
    known, and ConfigError if the vocabulary contradicts itself.
    """
    model = fields.get(_PREFIX + "model")
    tokens: list[str] = fields.get(_PREFIX + "tokens") or []
    if not tokens:
        raise UnsupportedModel(f"it has no vocabulary ({_PREFIX}tokens)")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ConfigError(f"{_PREFIX}tokens has {twice!r} twice")
    if model == "gpt2":
        pre_tokenizer = _pre_tokenizer(fields)
        tokenizer = _byte_level(fields, vocabulary, pre_tokenizer)
        add_bos, ids = pre_tokenizer.add_bos, {}
    elif model == "llama":
        tokenizer = _sentencepiece(fields, vocabulary)
        add_bos, ids = True, SENTENCEPIECE_IDS
    else:
        raise UnsupportedModel(f"{_PREFIX}model={model!r} is a kind of vocabulary that vattn does not know")

    special = _special_tokens(fields, tokens, ids)
    types = fields.get(_PREFIX + "token_type") or [1] * len(tokens)
    for token, kind in zip(tokens, types, strict=False):
        if kind == _CONTROL or token in special.values():
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind in (_USER_DEFINED, _UNKNOWN):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    begin, end = _around(fields, special, add_bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *begin, "$B:1", *end],
        special_tokens=[(token, vocabulary[token]) for token in {*begin, *end}],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,  # meant for WordPiece
        chat_template=fields.get("tokenizer.chat_template"),
        **{f"{role}_token": token for role, token in special.items()},
    )


def _pre_tokenizer(fields: dict[str, Any]) -> PreTokenizer:
    name = fields.get(_PREFIX + "pre") or "default"
    if name in NOT_BYTE_LEVEL:
        raise UnsupportedModel(f"{_PREFIX}pre={name!r} is not a byte-level pre-tokenizer")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(f"{_PREFIX}pre={name!r} is a pre-tokenizer that vattn does not know")
    return PRE_TOKENIZERS[name]


def _byte_level(fields: dict[str, Any], vocabulary: dict[str, int], pre_tokenizer: PreTokenizer) -> Tokenizer:
    merges = fields.get(_PREFIX + "merges")
    if merges is None:
        raise UnsupportedModel(f"{_PREFIX}model='gpt2' without {_PREFIX}merges")
    pairs = [_pair(merge) for merge in merges]
    for left, right in pairs:
        if not {left, right, left + right} <= vocabulary.keys():
            raise ConfigError(f"{_PREFIX}merges joins {left!r} and {right!r}, which are not all tokens")
    bpe = models.BPE(vocabulary, pairs, ignore_merges=pre_tokenizer.ignore_merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizer.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    """Both sides of a merge. Either may begin with a space, so the first character is never the gap."""
    gap = merge.find(" ", 1)
    if gap < 0:
        raise ConfigError(f"{_PREFIX}merges has {merge!r}, which is no pair")
    return merge[:gap], merge[gap + 1 :]


def _sentencepiece(fields: dict[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    """The pair whose joint token scores highest is merged first; what is left over becomes bytes."""
    scores = fields.get(_PREFIX + "scores")
    if scores is None or len(scores) < len(vocabulary):
        raise ConfigError(f"{_PREFIX}model='llama' needs one value in {_PREFIX}scores per token")
    merges = generate_merges(vocabulary, dict(zip(vocabulary, scores, strict=False)))
    unknown = _special_tokens(fields, list(vocabulary), SENTENCEPIECE_IDS).get("unk")
    bpe = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    prefix = bool(fields.get(_PREFIX + "add_space_prefix", True))
    escape = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escape]) if prefix else escape
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _special_tokens(fields: dict[str, Any], tokens: list[str], defaults: dict[str, int]) -> dict[str, str]:
    """`{role: token}`; an id beyond the vocabulary counts as not given."""
    found = {}
    for role, name in _ROLES.items():
        token_id = fields.get(f"{_PREFIX}{name}_token_id", defaults.get(role))
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            found[role] = tokens[token_id]
    return found


def _around(fields: dict[str, Any], special: dict[str, str], add_bos: bool) -> tuple[list[str], list[str]]:
    """The tokens put before and after a prompt."""
    around = []
    for role, default in (("bos", add_bos), ("eos", False)):
        wanted = bool(fields.get(f"{_PREFIX}add_{role}_token", default))
        if wanted and role not in special:
            raise ConfigError(f"{_PREFIX}add_{role}_token is set, but {_PREFIX}{role}_token_id is not")
        around.append([special[role]] if wanted else [])
    return around[0], around[1]

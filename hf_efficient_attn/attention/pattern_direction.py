"""What the pattern of a config is in a layer that reads the past, and in one that reads both directions."""

from hf_efficient_attn.attention.notices import warn_of_lonely
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.pattern import Pattern


def directed(pattern: Pattern, is_causal: bool) -> Pattern:
    """Return the causal form of a pattern for a causal layer, and the pattern itself for another.

    Raises:
        ConfigurationError: it depends on the length of the text in its causal form, or it chooses among past keys and
            the layer reads both directions.
    """
    if is_causal:
        # bidirectional patterns may have none
        return causal_form(pattern)
    if pattern.chooses_by_content:
        raise ConfigurationError(
            f"attention_pattern is {shown(pattern)}, which chooses among past keys, but this model reads both "
            "directions: no token would read what follows it. Give it to a decoder, or an encoder a pattern by "
            "position (Band, GlobalTokens, bigbird); efficient_reformer and routing_transformer choose in both "
            "directions."
        )
    return pattern


def causal_form(pattern: Pattern) -> Pattern:
    """Return the causal form of a pattern in a config; it warns if that leaves every token itself alone.

    Raises:
        ConfigurationError: it depends on the length of the text, so that what a token reads would change as the text
            grows, and decoding with a cache would differ from the whole text.
    """
    causal = pattern.causal()
    warn_of_lonely(pattern, causal)
    if causal.depends_on_length:
        blamed = causal
        while inner := next((part for part in blamed.parts if part.depends_on_length), None):
            blamed = inner
        raise ConfigurationError(
            f"attention_pattern has {shown(blamed)}, which depends on the length of the text even in its causal form: "
            "what a token reads would change as the text grows. In causal layers count positions from the start "
            "(GlobalTokens([0])), and use Band, Dilated, Strided or BlockLocal, or bigbird(..., causal=True)."
        )
    return causal

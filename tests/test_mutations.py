"""Break the package on purpose: each change must turn its named test red.

A copy of the package and of the tests is changed by one replacement, and the
named test runs in a fork of a process that has imported PyTorch and the like
already, but nothing of the package. The test must fail itself: not at
collection, not in a fixture, not for a name that the change took away.
"""
import ast
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

Mutation = namedtuple("Mutation", "name module old new test")

# what is changed, in which module, from, to, and the test that must see it
MUTATIONS = [Mutation(*row) for row in [
    # chapter 1
    ("mask inverted", "attend",
     "masked_fill(~mask, -math.inf)", "masked_fill(mask, -math.inf)",
     "test_attend.py::test_values_and_gradients_equal_sdpa"),
    ("causal mask hides the token itself", "attend",
     "k_pos[:, None, :] <= pos[:, :, None]",
     "k_pos[:, None, :] < pos[:, :, None]",
     "test_attend.py::test_masks_equal_loops"),
    ("causal mask shows the next token", "attend",
     "k_pos[:, None, :] <= pos[:, :, None]",
     "k_pos[:, None, :] <= pos[:, :, None] + 1",
     "test_attend.py::test_the_future_does_not_move_the_past"),
    ("scale dropped", "attend",
     "q.shape[-1] ** -0.5 if scale is None", "1.0 if scale is None",
     "test_attend.py::test_values_and_gradients_equal_sdpa"),
    ("padding attended to", "attend",
     "(k_pos >= 0)", "(k_pos >= -1)",
     "test_attend.py::test_a_padded_row_equals_the_row_alone"),
    ("dead rows divide by zero", "attend",
     "total.masked_fill(total == 0, 1.0)", "total",
     "test_attend.py::test_dead_rows_are_zero_with_finite_gradients"),
    ("softmax in the type it was given", "attend",
     "wide = x.to(torch.promote_types(x.dtype, torch.float32))", "wide = x",
     "test_attend.py::test_softmax_equals_torch"),
    # chapter 2
    ("ties broken the other way", "bpe",
     "min(tied, key=lambda p: [rank", "max(tied, key=lambda p: [rank",
     "test_bpe.py::test_ties"),
    ("special tokens not sorted by length", "bpe",
     "sorted(special_tokens, key=len, reverse=True)",
     "list(special_tokens)",
     "test_bpe.py::test_longest_special_token_wins"),
    # chapter 3
    ("a merge replaces what ranks last", "tokenizer",
     "best = min(map(rules.rank.get", "best = max(map(rules.rank.get",
     "test_tokenizer.py::test_both_ways_of_merging_agree"),
    ("a stream is cut inside a special token", "tokenizer",
     "max(map(len, special_tokens), default=1) + 1",
     "0 * max(map(len, special_tokens), default=1)",
     "test_tokenizer.py::test_every_cut_in_small_blocks"),
    # the tour
    ("the tour's mask shows the next token", "minimal",
     "dtype=torch.bool).tril()", "dtype=torch.bool).tril(1)",
     "test_minimal.py::test_no_output_moves_before_the_change"),
    # chapter 4
    ("sine and cosine swapped", "position",
     "[angle.sin(), angle.cos()]", "[angle.cos(), angle.sin()]",
     "test_position.py::test_sinusoids_equal_transformers"),
    ("sinusoids shifted by one", "position",
     "pos = torch.arange(self.max_len, device=device)",
     "pos = torch.arange(self.max_len, device=device) + 1",
     "test_position.py::test_the_first_row_is_position_0"),
    ("steps in the other direction", "position",
     "torch.stack([c, s, -s, c], dim=-1)",
     "torch.stack([c, -s, s, c], dim=-1)",
     "test_position.py::test_a_step_is_one_matrix_for_all_positions"),
    ("embedding scale dropped", "position",
     "x if self.scale == 1.0 else self.scale * x", "x",
     "test_position.py::test_values_and_gradients_equal_nn_embedding"),
    ("variance of the embedding 1, not 1/d_model", "position",
     "std=d_model ** -0.5", "std=1.0",
     "test_position.py::test_the_variance_is_one_over_d_model"),
    ("what leaves the meta device stays as it is", "position",
     "if old.is_meta and not new.is_meta:", "if False:",
     "test_derived.py::test_filled_after_the_meta_device"),
    ("what stayed on the meta device is used", "position",
     "if self._buffers[name].is_meta and not x.is_meta:", "if False:",
     "test_derived.py::test_weights_assigned_to_a_model_on_meta"),
    ("exact buffers follow the model's type", "position",
     "kind = old.dtype if self.exact else new.dtype", "kind = new.dtype",
     "test_derived.py::test_types"),
    ("a table derived again forgets its type", "position",
     "old = None if self.exact else self._buffers.get(name)", "old = None",
     "test_derived.py::test_types"),
    ("buffers of inference", "position",
     "torch.inference_mode(False)", "torch.inference_mode()",
     "test_derived.py::test_derived_in_inference_and_trained_after"),
    ("derived buffers are saved", "position",
     "persistent=False", "persistent=True",
     "test_derived.py::test_filled_after_the_meta_device"),
    ("print hides the base of sinusoids", "position",
     'f"{self.max_len}, {self.d_model}, base={self.base}"',
     'f"{self.max_len}, {self.d_model}"',
     "test_position.py::test_print_shows_all_that_changes_the_numbers"),
    # chapter 5
    ("rope layout swapped", "rotary",
     """    if layout == "half":
        return x.chunk""", """    if layout != "half":
        return x.chunk""",
     "test_rotary.py::test_a_rotary_turns_as_rotate_does"),
    ("rope signs swapped in a Rotary", "rotary",
     "_joined(-freqs, freqs, self._made)",
     "_joined(freqs, -freqs, self._made)",
     "test_rotary.py::test_a_rotary_turns_as_rotate_does"),
    ("rope pairs not swapped in a Rotary", "rotary",
     "return x.roll(x.shape[-1] // 2, -1)", "return x",
     "test_rotary.py::test_a_rotary_turns_as_rotate_does"),
    ("the gradient of a turn is turned on", "rotary",
     "back = _swapped(sin, ctx.layout)", "back = sin",
     "test_rotary.py::test_the_gradient_of_a_turn"),
    ("narrow halves turn against each other", "rotary",
     "b.mul_(cos_b).add_(from_a)", "b.mul_(cos_b).sub_(from_a)",
     "test_rotary.py::test_a_narrow_turn_is_the_wide_one_rounded_once"),
    ("a tangent is not turned", "rotary",
     "return _turn(x, *ctx.saved_tensors, ctx.layout)", "return x",
     "test_rotary.py::test_a_turn_under_transforms"),
    ("rope layout swapped in a Rotary", "rotary",
     'scale: float = 1.0, layout: str = "half"):',
     'scale: float = 1.0, layout: str = "interleaved"):',
     "test_rotary.py::test_half_layout_equals_llama"),
    ("rope converts to the other layout", "rotary",
     "forms[::-1]", "forms",
     "test_rotary.py::test_the_same_model_in_both_layouts_gives_the_same"
     "_logits"),
    ("rope turns backwards", "rotary",
     "torch.addcmul(a * cos, b, sin, value=-1)",
     "torch.addcmul(a * cos, b, sin)",
     "test_rotary.py::test_a_rotary_turns_as_rotate_does"),
    ("rope positions shifted by one", "rotary",
     "pos[:, None, :, None] * turns",
     "(pos + 1)[:, None, :, None] * turns",
     "test_rotary.py::test_half_layout_equals_llama"),
    ("relative positions shifted by one", "rotary",
     "return k_pos[:, None, :] - pos[:, :, None]",
     "return k_pos[:, None, :] - pos[:, :, None] + 1",
     "test_rotary.py::test_relative_positions_are_key_minus_query"),
    ("T5's sides swapped", "rotary",
     "side * (distance > 0)", "side * (distance < 0)",
     "test_rotary.py::test_t5_buckets_equal_transformers"),
    ("ALiBi rewards distance", "rotary",
     "relative_positions(pos, k_pos).abs()",
     "relative_positions(pos, k_pos)",
     "test_rotary.py::test_alibi_equals_bloom"),
    ("yarn blends from below the first pair", "rotary",
     "max(math.floor(pair(beta_fast)), 0)", "math.floor(pair(beta_fast))",
     "test_rotary.py::test_yarn_beyond_the_ends_equals_transformers"),
    ("yarn blends to beyond the width", "rotary",
     "min(math.ceil(pair(beta_slow)), d_head - 1)",
     "math.ceil(pair(beta_slow))",
     "test_rotary.py::test_yarn_beyond_the_ends_equals_transformers"),
    ("yarn blends outside of its ends", "rotary",
     "max(last - first, 0.001)).clamp(0, 1)",
     "max(last - first, 0.001)).clamp(0)",
     "test_rotary.py::test_yarn_equals_transformers"),
    ("yarn slows what is fast", "rotary",
     "max(last - first, 0.001)).clamp(0, 1)",
     "max(last - first, 0.001)).clamp(max=1)",
     "test_rotary.py::test_yarn_equals_transformers"),
    ("given frequencies forgotten", "rotary",
     "if self.given is None else torch.tensor(",
     "if True else torch.tensor(",
     "test_rotary.py::test_yarn_in_a_rotary_equals_llama"),
    ("frequencies in the default type", "rotary",
     "self.given, dtype=torch.float32", "self.given",
     "test_derived.py::test_whatever_the_default_type_is"),
    ("frequencies without values on the meta device", "rotary",
     'i = torch.arange(0, d_head, 2, dtype=torch.float32, device="cpu")',
     "i = torch.arange(0, d_head, 2, dtype=torch.float32)",
     "test_derived.py::test_filled_after_the_meta_device"),
    ("angles without the scale", "rotary",
     "cos, sin = self.scale * cos, self.scale * sin", "pass",
     "test_rotary.py::test_angles_made_once_serve_every_layer"),
    ("given angles ignored", "rotary",
     "(pos is None) != (angles is None)", "True",
     "test_rotary.py::test_angles_made_once_serve_every_layer"),
    ("angles of another length are broadcast", "rotary",
     "if x.shape[2:] != cos.shape[2:] or", "if",
     "test_rotary.py::test_rotary_names_what_does_not_fit"),
    ("angles of another batch are broadcast", "rotary",
     " or 1 != cos.shape[0] != x.shape[0]:", ":",
     "test_rotary.py::test_rotary_names_what_does_not_fit"),
    ("rope turns its input in place", "rotary",
     "if x.dtype == wide:", "if False:",
     "test_rotary.py::test_scale_multiplies_and_the_input_is_left_alone"),
    ("a layout set later changes nothing", "rotary",
     "turns = _joined(-self.freqs, self.freqs, self.layout)", "pass",
     "test_rotary.py::test_rotary_names_what_does_not_fit"),
    ("print hides which frequencies were given", "rotary",
     "{zlib.crc32(repr(self.given).encode()):08x}", "",
     "test_rotary.py::test_print_shows_all_that_changes_the_numbers"),
    ("Shaw's rows start at the query", "rotary",
     "relative_positions(pos - far, k_pos).clamp(0, 2 * far)",
     "relative_positions(pos, k_pos).clamp(0, 2 * far)",
     "test_rotary.py::test_shaw_equals_its_equations"),
    ("Shaw's bias not scaled", "rotary",
     "self.key_table.to(wide) * q.shape[-1] ** -0.5",
     "self.key_table.to(wide)",
     "test_rotary.py::test_shaw_keys_equal_transformers"),
    # chapter 6
    ("the quick RMSNorm forgets its weight", "layers",
     "return x * power.rsqrt_() * weight", "return x * power.rsqrt_()",
     "test_layers.py::test_the_quick_rms_norm_is_the_norm"),
    ("a quick look at shapes ignores widths", "expect",
     "and q.shape[-1] == k.shape[-1] and q.ndim > 2", "and q.ndim > 2",
     "test_expect.py::test_no_quick_look_lets_attention_pass"),
    ("a quick look at shapes ignores types", "expect",
     "q.dtype == k.dtype == v.dtype and q.is_floating_point()",
     "q.is_floating_point()",
     "test_expect.py::test_no_quick_look_lets_types_pass"),
    ("eps of RMSNorm 1e-5", "layers",
     "def __init__(self, d_model: int, *, eps: float = 1e-6):",
     "def __init__(self, d_model: int, *, eps: float = 1e-5):",
     "test_layers.py::test_norms_equal_torch"),
    ("eps of rms_norm 1e-5", "layers",
     "eps: float = 1e-6,  # added", "eps: float = 1e-5,  # added",
     "test_layers.py::test_the_default_eps_is_that_of_the_checkpoints"),
    ("eps of LayerNorm 1e-6", "layers",
     "def __init__(self, d_model: int, *, eps: float = 1e-5,",
     "def __init__(self, d_model: int, *, eps: float = 1e-6,",
     "test_layers.py::test_the_default_eps_is_that_of_the_checkpoints"),
    ("exact GELU where the tanh form belongs", "layers",
     'partial(F.gelu, approximate="tanh")', "F.gelu",
     "test_layers.py::test_feed_forward_equals_gpt2"),
    ("tanh GELU where the exact form belongs", "layers",
     '"gelu": F.gelu,', '"gelu": partial(F.gelu, approximate="tanh"),',
     "test_layers.py::test_feed_forward_equals_bert"),
    ("dropout active in eval", "layers",
     "if not self.training or self.p == 0:", "if self.p == 0:",
     "test_layers.py::test_dropout_is_off_in_eval_and_at_0"),
    ("dropout, written out, active in eval", "layers",
     "if not training or p == 0:", "if p == 0:",
     "test_layers.py::test_dropout_is_off_in_eval_and_at_0"),
    ("pre-norm becomes post-norm", "layers",
     "x + self.dropout(self.part(self.norm(x), *args, **kwargs))",
     "self.norm(x + self.dropout(self.part(x, *args, **kwargs))) + 0",
     "test_layers.py::test_the_two_orders_equal_torch"),
    ("post-norm becomes pre-norm", "layers",
     "self.norm(x + self.dropout(self.part(x, *args, **kwargs)))",
     "x + self.dropout(self.part(self.norm(x), *args, **kwargs)) + 0",
     "test_layers.py::test_the_two_orders_equal_torch"),
    ("gate and value swapped", "layers",
     "(self.gate_proj(x))", "(self.up_proj(x))",
     "test_layers.py::test_gated_feed_forward_equals_llama"),
    ("residual projections not scaled", "layers",
     '"residual": std * shrink', '"residual": std',
     "test_layers.py::test_init_weights_follows_its_table"),
    ("a norm takes gains of any width", "layers",
     """        if x.shape[-1:] != weight.shape:
            expect.shapes(x=(x, f"*b {len(weight)}"))
        if x.dtype != weight.dtype:  # the kernel wants one type
            return rms_norm""", """        if x.dtype != weight.dtype:
            return rms_norm""",
     "test_layers.py::test_wrong_arguments_are_named"),
    ("mixed types are left to the kernel", "layers",
     """        if x.dtype != weight.dtype:  # the kernel wants one type
            return layer_norm""", """        if False:
            return layer_norm""",
     "test_layers.py::test_mixed_types_are_rounded_once"),
    ("mixed types are rounded before the gains", "layers",
     "wide * torch.rsqrt(mean_square + eps)",
     "(wide * torch.rsqrt(mean_square + eps)).to(x.dtype)",
     "test_layers.py::test_mixed_types_are_rounded_once"),
    ("a wrapped part's cache is lost", "layers",
     "None if make is None else make(batch, max_len)", "None",
     "test_layers.py::test_the_cache_of_a_wrapped_part"),
    ("a wrapped part's cache without its length", "layers",
     "make(batch, max_len)", "make(batch)",
     "test_layers.py::test_the_cache_of_a_wrapped_part"),
    # chapter 7
    ("heads cut across", "attention",
     '"b t (h d) -> b h t d"', '"b t (d h) -> b h t d"',
     "test_attention.py::test_heads_are_runs_of_consecutive_features"),
    ("a layer's heads cut across", "attention",
     "y.view(*x.shape[:2], n, y.shape[-1] // n)",
     "y.view(*x.shape[:2], y.shape[-1] // n, n).mT",
     "test_attention.py::test_self_attention_equals_torch"),
    ("heads of a memory cut across", "attention",
     "x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)",
     "x.unflatten(-1, (-1, self.n_heads)).permute(0, 3, 1, 2)",
     "test_attention.py::test_cross_attention_equals_torch"),
    ("a layer's heads merged by a view", "attention",
     "output.transpose(1, 2).flatten(2)",
     "output.reshape(output.shape[0], output.shape[2], -1)",
     "test_attention.py::test_self_attention_equals_torch"),
    ("heads tiled, not repeated", "rows",
     '"b kv s d -> b (kv n) s d"', '"b kv s d -> b (n kv) s d"',
     "test_attention.py::test_repeated_heads_are_consecutive"),
    ("scale dropped in the kernel", "rows",
     "scale=scale, enable_gqa=n > 1", "scale=1.0, enable_gqa=n > 1",
     "test_attention.py::test_self_attention_equals_torch"),
    ("scale dropped beside a mask", "rows",
     "added, dropout,\n        scale=scale)", "added, dropout)",
     "test_attention.py::test_both_paths_agree"),
    ("dropout dropped beside a mask", "rows",
     "added, dropout,\n        scale=scale)", "added,\n        scale=scale)",
     "test_attention.py::test_dropout_keeps_the_mean"),
    ("explicit dropout narrowed by autocast", "attention",
     "        if dropout > 0.0:\n            output",
     "    if dropout > 0.0:\n            output",
     "test_attention.py::test_explicit_dropout_under_autocast_is_wide"),
    ("weights narrowed by autocast", "attention",
     "weights.to(self.o_proj.weight.dtype)", "weights.to(q.dtype)",
     "test_attention.py::test_autocast_does_not_reach_the_explicit_path"),
    ("the caller's mask inverted", "attention",
     "return allowed if mask is None else allowed & mask",
     "return allowed if mask is None else allowed & ~mask",
     "test_attention.py::test_masks_through_the_adapters"),
    ("the kernel's mask inverted", "rows",
     "torch.where(mask, added, -math.inf)",
     "torch.where(mask, -math.inf, added)",
     "test_attention.py::test_both_paths_agree"),
    ("dead rows answer", "rows",
     "if not dead.any():", "if True:",
     "test_attention.py::test_both_paths_agree"),
    ("the kernel's causal flag off", "attention",
     "return dict(causal=True)", "return {}",
     "test_attention.py::test_the_future_does_not_move_the_past"),
    ("causal=True off by one", "rows",
     "lower.tril()", "lower.tril(1)",
     "test_attention.py::test_causal_is_the_causal_mask"),
    ("causal mask of positions off by one", "attention",
     "allowed & causal_mask(pos, k_pos)",
     "allowed & causal_mask(pos + 1, k_pos)",
     "test_attention.py::test_cached_equals_uncached_for_every_chunking"),
    ("padding attended to by a layer", "attention",
     "allowed = padding_mask(k_pos)", "allowed = padding_mask(k_pos.abs())",
     "test_attention.py::test_padded_equals_unpadded"),
    ("padding that is known is attended to", "attention",
     "            k_pos.start >= 0):  # no padding", "            True):",
     "test_attention.py::test_known_positions_may_begin_with_padding"),
    ("padding of a memory attended to", "attention",
     "k_pos = Positions.of(memory_pos, memory)",
     "k_pos = Positions.of(None, memory)",
     "test_attention.py::test_cross_attention_equals_torch"),
    ("dropout of weights active in eval", "attention",
     "self.dropout if self.training else 0.0", "self.dropout",
     "test_attention.py::test_dropout_acts_in_training_only"),
    ("keys not turned", "attention",
     "q, k = self.rotary(q, k, pos=pos)", "q, = self.rotary(q, pos=pos)",
     "test_attention.py::test_rotary_gets_positions"),
    ("what is turned begins again in every call", "attention",
     "q, k = self.rotary(q, k, pos=pos)",
     "q, k = self.rotary(q, k, pos=pos.at - pos.at[:, :1])",
     "test_attention.py::test_cached_equals_uncached_for_every_chunking"),
    ("QK-norm of the keys by the queries' norm", "attention",
     "else self.k_norm(k)", "else self.q_norm(k)",
     "test_attention.py::test_norms_act_on_heads_before_they_turn"),
    ("QK-norm of the queries left out", "attention",
     "q if self.q_norm is None else self.q_norm(q)", "q",
     "test_attention.py::test_norms_act_on_heads_before_they_turn"),
    ("x without a batch is cut anyhow", "attention",
     "        if x.ndim != 3:", "        if False:",
     "test_attention.py::test_wrong_arguments_are_named"),
    # chapter 7: positions
    ("positions restart in every call", "attention",
     "pos = Positions.of(pos, x, cache)", "pos = Positions.of(pos, x)",
     "test_attention.py::test_cached_equals_uncached_for_every_chunking"),
    ("positions after a cache shifted by one", "rows",
     "start=(self.start or 0) + self.n, n=n,",
     "start=(self.start or 0) + self.n + (self.n > 0), n=n,",
     "test_attention.py::test_cached_equals_uncached_for_every_chunking"),
    ("nothing follows where all was forgotten", "rows",
     "if self.start is not None or not self.n:",
     "if self.start is not None:",
     "test_attention.py::test_crop_with_one_number_for_each_row"),
    ("positions after a ragged cache shifted by one", "rows",
     "torch.arange(1, n + 1, device=last.device)",
     "torch.arange(2, n + 2, device=last.device)",
     "test_attention.py::test_ragged_batches_equal_each_text_alone"),
    ("positions that follow are those of the widest row", "rows",
     "last = self.at.amax(-1, keepdim=True)",
     "last = self.at.amax(-1, keepdim=True).amax(0, keepdim=True)",
     "test_attention.py::test_ragged_batches_equal_each_text_alone"),
    ("the end is the last position", "rows",
     "self._at.max().item() + 1", "self._at.max().item()",
     "test_attention.py::test_a_tensor_of_positions_is_looked_at_once"),
    ("a device is asked for the end each time", "rows",
     "if self._end is None and not blind", "if not blind",
     "test_attention.py::test_a_tensor_of_positions_is_looked_at_once"),
    ("the end does not travel through the cache", "rows",
     "return Positions(at, end=max(ends))", "return Positions(at)",
     "test_attention.py::test_a_step_reads_no_value"),
    ("what is derived once ignores its key", "rows",
     "if len(known) == len(key) and all(\n"
     "                    [a is b for a, b in zip(known, key)]):",
     "if True:", "test_attention.py::test_once_is_once_for_each_key"),
    ("layers of other rules share a mask", "attention",
     '("causal" if causal else "all", k_pos, mask)', "(k_pos,)",
     "test_attention.py::test_layers_of_other_rules_do_not_share"),
    ("keys of equal length share a mask", "attention",
     '("causal" if causal else "all", k_pos, mask)',
     '("causal" if causal else "all", mask)',
     "test_attention.py::test_layers_of_other_rules_do_not_share"),
    ("nothing is derived once", "rows",
     "self._made += [(key, made := make())]",
     "self._made[:] = [(key, made := make())]",
     "test_attention.py::test_once_is_once_for_each_key"),
    ("the positions of each layer's cache are its own", "rows",
     "pos.once((past,), lambda: _joined(past, pos))",
     "_joined(past, pos)",
     "test_attention.py::test_layers_share_what_follows_from_positions"),
    ("positions hold themselves", "rows",
     "None if a is self else a for a in key", "a for a in key",
     "test_attention.py::test_positions_let_go_of_their_masks"),
    # chapter 7: which path
    ("a chunk after the cache sees ahead", "attention",
     "k_pos.start + k_pos.n - 1 <= pos.start", "k_pos.start <= pos.start",
     "test_attention.py::test_cached_equals_uncached_for_every_chunking"),
    ("a key behind the first query goes unmasked", "attention",
     "k_pos.start + k_pos.n - 1 <= pos.start",
     "k_pos.start + k_pos.n - 2 <= pos.start",
     "test_attention.py::test_rules_allow_what_the_mask_allows"),
    ("keys before the queries are what needs a mask", "attention",
     "k_pos.start + k_pos.n - 1 <= pos.start",
     "k_pos.start + k_pos.n - 1 >= pos.start",
     "test_attention.py::test_rules_allow_what_the_mask_allows"),
    ("one token after many is given a mask", "attention",
     "k_pos.start + k_pos.n - 1 <= pos.start",
     "k_pos.start + k_pos.n + 1 <= pos.start",
     "test_attention.py::test_the_causal_flag_is_used_only_where_it_is_right"
     ),
    ("the flag where queries begin later than keys", "attention",
     "if pos.start == k_pos.start and pos.n == k_pos.n:",
     "if pos.n == k_pos.n:",
     "test_attention.py::test_rules_allow_what_the_mask_allows"),
    ("a mask where the flag will do", "attention",
     "if pos.start == k_pos.start and pos.n == k_pos.n:", "if False:",
     "test_attention.py::test_the_causal_flag_is_used_only_where_it_is_right"
     ),
    # chapter 7: what is kept
    ("cache slot empty", "rows",
     "torch.cat(p, -2) for p in zip(self.kept, tensors)]",
     "torch.cat(p, -2) for p in zip(self.kept, map(\n"
     "                torch.zeros_like, tensors))]",
     "test_attention.py::test_cached_equals_uncached_for_every_chunking"),
    ("cache slot of the room empty", "rows",
     "buffer.narrow(-2, start, n).copy_(x)",
     "buffer.narrow(-2, start, n).zero_()",
     "test_attention.py::test_with_and_without_gradients_the_cache_is_equal"
     ),
    ("whoever shares the room may write", "rows",
     "return self.used == n and n + t", "return n + t",
     "test_attention.py::test_branches_of_a_copied_cache_do_not_overwrite_"
     "each_other"),
    ("a room of inference is written to outside", "rows",
     " and (\n            not self.buffers[0].is_inference()\n"
     "            or torch.is_inference_mode_enabled())", "",
     "test_attention.py::test_a_cache_of_inference_goes_on_outside_of_it"),
    ("a room without space beyond", "rows",
     "Room(self.kept, 2 * (n + t))", "Room(self.kept, n + t)",
     "test_attention.py::test_growing_copies_seldom"),
    ("another type is written into the room", "rows",
     "torch.compiler.is_compiling() or (\n                not alike):",
     "torch.compiler.is_compiling():",
     "test_attention.py::test_tensors_of_another_type_are_joined_not_written"
     ),
    ("a room outlives select", "rows",
     "super().hold(kept, k_pos)\n        self._room = None",
     "super().hold(kept, k_pos)",
     "test_attention.py::test_branches_after_crop_and_select"),
    ("a cache keeps the other projections alive", "rows",
     "return [x.contiguous() for x in tensors]", "return list(tensors)",
     "test_attention.py::test_nbytes_is_what_is_stored"),
    ("a gap between positions is not seen", "rows",
     "pos.start == past.start + past.n:", "pos.start is not None:",
     "test_attention.py::test_positions_that_do_not_follow_are_kept_as_they_"
     "are"),
    ("crop keeps one too many", "rows",
     "n = min(max(n - k_pos.start, 0), k_pos.n)",
     "n = min(max(n + 1 - k_pos.start, 0), k_pos.n)",
     "test_attention.py::test_crop_forgets_from_n_on"),
    ("crop of rows keeps one too many", "rows",
     "masked_fill(k_pos.at >= n, -1)", "masked_fill(k_pos.at > n, -1)",
     "test_attention.py::test_crop_with_one_number_for_each_row"),
    ("crop of rows cuts at the first row's number", "rows",
     "n if isinstance(n, int) else n[:, None]",
     "n if isinstance(n, int) else n[:1, None]",
     "test_attention.py::test_crop_with_one_number_for_each_row"),
    ("crop is not taken back where a layer refuses", "rows",
     "vars(layer).update(held)", "pass",
     "test_attention.py::test_crop_is_all_or_nothing"),
    ("crop of nested layers is not taken back", "rows",
     "yield from layer._leaves() if inner else [layer]", "yield layer",
     "test_attention.py::test_crop_is_all_or_nothing"),
    ("select leaves the positions as they were", "rows",
     "                      _rows_of(past, rows))",
     "                      past)",
     "test_attention.py::test_select_reorders_every_row"),
    ("a memory of equal shape passes for the one kept", "rows",
     "memory is not None and (memory is not self.memory\n",
     "memory is not None and (getattr(\n"
     "            self.memory, 'shape', 0) != memory.shape\n",
     "test_attention.py::test_another_memory_is_another_answer"),
    ("a memory is projected in every call", "rows",
     "        if new:\n            self.kept", "        if True:\n"
     "            self.kept",
     "test_attention.py::test_a_memory_is_projected_once"),
    ("a memory changed in place passes for the one kept", "rows",
     "or stamp != self._stamp)", ")",
     "test_caches.py::test_a_memory_that_was_changed_in_place_is_another"),
    ("the same memory loses its padding", "rows",
     "if new or pos is not None:",
     "if memory is not None or pos is not None:",
     "test_caches.py::test_the_same_memory_keeps_its_padding"),
    ("a refused step leaves some layers changed", "model",
     "else cache.all_or_none\n", "else contextlib.nullcontext\n",
     "test_caches.py::test_a_refused_step_leaves_the_cache_as_it_was"),
    ("fewer positions than keys", "attention",
     "if k_pos.n != shape[-1]:", "if False:",
     "test_caches.py::test_positions_of_fewer_keys_are_refused"),
    ("places that nobody needs are kept", "rows",
     "places = (at >= 0).any(0).nonzero()[:, 0]",
     "places = torch.arange(at.shape[1])",
     "test_caches.py::test_a_server_does_not_grow_without_end"),
    ("positions are no more shared after a verb", "rows",
     "leaf.k_pos = first.setdefault(", "first.setdefault(",
     "test_caches.py::test_layers_share_positions_after_every_verb"),
    ("the cache keeps the caller's positions", "rows",
     "pos.at.clone() if", "pos.at if",
     "test_caches.py::test_a_buffer_of_positions_may_be_used_again"),
    ("a large bias is rounded as it is", "rows",
     "added = (added - top.masked_fill(top == -math.inf, 0.0)).to(dtype)",
     "added = added.to(dtype)",
     "test_caches.py::test_a_large_bias_is_rounded_where_it_is_small"),
    ("what follows padding is padding", "rows",
     "self.at.amax(-1, keepdim=True).clamp(min=-1)",
     "self.at.amax(-1, keepdim=True)",
     "test_caches.py::test_padding_below_minus_one_and_nothing_at_all"),
    ("select forgets the limit", "rows",
     "k_pos.at.index_select(0, rows), bound=k_pos.bound)",
     "k_pos.at.index_select(0, rows))",
     "test_caches.py::test_the_limit_holds_where_nobody_looks"),
    ("crop and put forget the limit", "rows",
     "return Positions(at, end=Positions(at).end), places",
     "return Positions(at), places",
     "test_caches.py::test_the_limit_holds_where_nobody_looks"),
    ("given positions beyond the limit", "model",
     "if given is not None and end is None or (", "if (",
     "test_caches.py::test_the_limit_holds_where_nobody_looks"),
    ("an attention without a cache gets none", "model",
     "if made is not None:", "if True:",
     "test_caches.py::test_an_attention_without_a_cache_of_its_own_gets_"
     "one"),
    ("nobody tries rows at different positions", "check",
     "        trial.check_places()\n", "",
     "test_caches.py::test_check_cache_finds_broken_verbs"),
    ("halves are turned in place while one learns", "rotary",
     "            not learns):", "            True):",
     "test_rotary.py::test_learned_angles_of_a_narrow_type"),
    ("eps is written twice", "layers",
     "_constant(eps).addcmul", "_constant(1e-6).addcmul",
     "test_layers.py::test_the_size_of_eps_is_read_in_every_mode"),
    ("select leaves the memory as it was", "rows",
     "self.hold([x.index_select(0, rows) for x in self.kept],",
     "self.hold(self.kept,",
     "test_attention.py::test_memory_is_kept_follows_select_and_ignores"
     "_crop"),
    ("after select the old memory passes for the new", "rows",
     "super().hold(kept, k_pos)\n        self.memory = None",
     "super().hold(kept, k_pos)",
     "test_attention.py::test_after_select_the_old_memory_is_another_one"),
    ("a kept memory's padding forgotten", "rows",
     "self.k_pos = Positions.of(pos, tokens)",
     "self.k_pos = Positions.of(None, tokens)",
     "test_attention.py::test_memory_is_kept_follows_select_and_ignores"
     "_crop"),
    ("select leaves a memory's padding as it was", "rows",
     "                      _rows_of(past, rows))",
     "                      past)",
     "test_attention.py::test_memory_is_kept_follows_select_and_ignores"
     "_crop"),
    ("the way is chosen before the cache is asked", "attention",
     "k_pos = Positions.of(k_pos)\n        how",
     "k_pos = Positions(start=0, n=k.shape[-2])\n        how",
     "test_caches.py::test_greedy_decoding_equals_no_cache"),
    ("as many keys are supposed as there are queries", "attention",
     "k_pos = Positions.of(k_pos)\n        how",
     "k_pos = pos\n        how",
     "test_caches.py::test_all_places_may_be_given_back"),
    ("rows are put into the places after theirs", "rows",
     "return old.index_copy(0, rows, new)",
     "return old.index_copy(0, (rows + 1) % len(old), new)",
     "test_caches.py::test_several_rows_are_put_at_once"),
    ("places that were filled up count as tokens", "rows",
     "rows, new.at.expand(len(rows), -1), -1, -1)",
     "rows, new.at.expand(len(rows), -1), 0, -1)",
     "test_caches.py::test_rows_that_end_are_taken_by_others"),
    ("put leaves the positions as they were", "rows",
     "for x, y in zip(old, other.kept)], k_pos)",
     "for x, y in zip(old, other.kept)], self.k_pos or k_pos)",
     "test_caches.py::test_rows_that_end_are_taken_by_others"),
    ("rows that are not there", "expect",
     "and all(0 <= i < batch for i in found)", "",
     "test_caches.py::test_verbs_refuse_what_is_no_row_and_no_number"),
    ("rows of another width are put", "rows",
     "expect.that(new == (old or new),", "expect.that(True,",
     "test_caches.py::test_rows_that_do_not_fit_are_named"),
    ("after a layer refused, others have changed", "rows",
     "                vars(layer).update(held)", "                pass",
     "test_caches.py::test_rows_that_do_not_fit_are_named"),
    ("an empty cache does not know its rows", "rows",
     "self.batch, self.kept, self.k_pos = batch, [], None",
     "self.batch, self.kept, self.k_pos = None, [], None",
     "test_caches.py::test_an_empty_cache_knows_its_rows"),
    ("a limit is that of rows that left", "model",
     "expect.at_most(self.max_len, tokens=pos.end)",
     "expect.at_most(self.max_len, tokens=end)",
     "test_caches.py::test_the_limit_is_that_of_the_rows_that_are_there"),
    ("a step waits for the device to know its end", "model",
     "        end = pos.bound\n", "        end = pos.end\n",
     "test_caches.py::test_a_step_of_a_cache_reads_no_value"),
    ("a step waits for the device to check its ids", "position",
     "            or not ids.is_cpu and ids.shape[-1] == 1)",
     "            )",
     "test_caches.py::test_a_step_of_a_model_reads_no_value"),
    # chapter 8
    ("the map of influence on its side", "check",
     "return moved.T.cpu(), logits", "return moved.cpu(), logits",
     "test_check.py::test_a_report_prints_and_pickles"),
    ("a variant replaces the token before", "check",
     "rows[place + 1, place] = other[0]",
     "rows[place + 1, place - 1] = other[0]",
     "test_check.py::test_variants_replace_one_token_each"),
    ("a mask off by one is not told", "check",
     "ones_like(seen).tril(reach).triu(1)",
     "ones_like(seen).tril(reach + 1).triu(1)",
     "test_check.py::test_patterns_are_told_apart"),
    ("the tolerance is ten times wider", "check",
     "part * (max(1.0, largest)", "part * (max(10.0, largest)",
     "test_check.py::test_tolerance_is_that_of_the_course"),
    ("a model may be compared with itself", "check",
     "ours.inner is not theirs.inner and not mine & other", "True",
     "test_check.py::test_a_comparison_with_itself_is_refused"),
    ("padding is never marked", "check",
     "pos = _positions(keep) if adapter.pads else None", "pos = None",
     "test_check.py::test_own_padding_by_a_function"),
    ("a model in training is checked with its dropout", "check",
     "                model.eval()", "                model.train()",
     "test_check.py::test_dropout_of_a_model_in_training_is_no_mistake"),
    ("a leak between rows is not looked for", "check",
     "            if far > self.tolerance(logits):\n"
     "                self.explain_rows(strangers, kept, far)\n", "",
     "test_check.py::test_mistakes_are_named"),
    ("half of a module's state is put back", "check",
     "        if self.attributes:\n"
     "            self.restore_attributes()\n", "",
     "test_check.py::test_at_rest_restores_after_an_error"),
    ("lists of a module keep what a check put in", "check",
     "            value.clear()\n", "",
     "test_check.py::test_at_rest_restores_after_an_error"),
    ("nothing tested passes as padding", "check",
     "        if self.need <= 4:\n", "        if False:\n",
     "test_check.py::test_mistakes_are_named"),
    ("an unknown side is padded", "check",
     'set(sides) <= {"right", "left"}', "True",
     "test_check.py::test_what_would_test_nothing_is_refused"),
    ("a misspelled check is skipped", "check",
     "set(skip) <= set(checks)", "True",
     "test_check.py::test_what_would_test_nothing_is_refused"),
    # chapter 9
    ("targets are not shifted", "seq2seq",
     "F.pad(ids[:, :-1], (1, 0), value=start)", "ids",
     "test_seq2seq.py::test_shift_right_puts_the_start_first_and_drops_"
     "the_last"),
    ("the memory's padding is attended to", "seq2seq",
     "memory=memory, memory_pos=memory_pos,\n"
     "                                 cache=other)",
     "memory=memory, cache=other)",
     "test_seq2seq.py::test_a_source_padded_on_any_side_equals_the_source_"
     "alone"),
    ("the table is not tied", "seq2seq",
     "        self.lm_head.weight = self.embed.weight\n", "",
     "test_seq2seq.py::test_one_table_embeds_both_texts_and_makes_the_"
     "logits"),
    ("cross-attention stands before self-attention", "seq2seq",
     "        x = self.attention(x, pos=pos, mask=mask, cache=own)\n"
     "        x = self.cross_attention(x, memory=memory, "
     "memory_pos=memory_pos,\n"
     "                                 cache=other)\n",
     "        x = self.cross_attention(x, memory=memory, "
     "memory_pos=memory_pos,\n"
     "                                 cache=other)\n"
     "        x = self.attention(x, pos=pos, mask=mask, cache=own)\n",
     "test_seq2seq.py::test_equals_nn_transformer_in_value_and_gradient"),
    ("a finished row goes on writing", "seq2seq",
     ".masked_fill(done, eos)", "",
     "test_seq2seq.py::test_greedy_ends_each_row_by_itself"),
    # what all models share
    ("files of two saves are mixed", "model",
     "expect.that(not differ, f", "expect.that(True, f",
     "test_model.py::test_files_of_two_saves_are_refused"),
    ("a save that was cut between its files does not load", "model",
     "if inside and text == old:", "if False:",
     "test_model.py::test_an_interrupted_save_leaves_the_old_model_or_"
     "the_new"),
    ("a file is put in place before the other is written", "expect",
     "            write(beside[path])\n",
     "            write(beside[path])\n            "
     "os.replace(beside[path], path)\n            write(beside[path])\n",
     "test_model.py::test_an_interrupted_save_leaves_the_old_model_or_"
     "the_new"),
    ("a tied table is torn in two on its way from meta", "model",
     "            for name in others:\n                owner",
     "            for name in []:\n                owner",
     "test_model.py::test_made_on_meta_and_loaded_equals_made_here"),
    ("tables are not derived anew after meta", "position",
     "                self.renew(new.device)\n",
     "                pass\n",
     "test_model.py::test_made_on_meta_and_loaded_equals_made_here"),
    ("weights are read into another attention", "model",
     "    _same_parts(folder, saved, model)\n", "",
     "test_model.py::test_attentions_of_equal_weights_are_told_apart"),
    ("the types of the file are lost", "model",
     "    _adopt_types(model, tensors)\n", "",
     "test_model.py::test_a_model_comes_back_from_its_folder"),
    ("loading draws random numbers", "model",
     "with torch.random.fork_rng(devices=[]):", "if True:",
     "test_model.py::test_views_shares_and_types_of_all_kinds_survive"),
    ("another class is loaded", "model",
     "expect.that(name == cls.__name__, f", "expect.that(name, f",
     "test_model.py::test_another_class_is_refused"),
    ("a 0/1 mask passes for positions", "expect",
     "ones = pos == 1", "ones = pos == -5",
     "test_model.py::test_a_mask_of_zeros_and_ones_is_refused_as_"
     "positions"),
    ("a mask's tokens are counted from 1", "model",
     "keep.cumsum(-1) - 1)", "keep.cumsum(-1))",
     "test_model.py::test_positions_made_of_a_mask_make_rows_equal_rows_"
     "alone"),
    ("a cache of another model is taken", "expect",
     "len(cache.layers) != n_layers", "len(cache.layers) < n_layers",
     "test_model.py::test_a_cache_of_another_model_is_refused_and_left_"
     "alone"),
    # chapter 11
    ("segments ignored", "bert",
     "else _segment_rows(self.segments, segments))",
     "else self.segments.weight[0])",
     "test_bert.py::test_the_parts_add_up"),
    ("the mask-filling head has a table of its own", "bert",
     "self.weight = table  #",
     "self.weight = nn.Parameter(table.detach().clone())  #",
     "test_bert.py::test_the_decoder_is_the_table_and_is_saved_once"),
    ("GELU of the head by tanh", "bert",
     "ACTIVATIONS[self.activation](self.proj(x))",
     'ACTIVATIONS["gelu_tanh"](self.proj(x))',
     "test_bert.py::test_the_head_is_written_out"),
    ("the pooler takes place 0", "bert",
     "return torch.tanh(self.proj(x[rows, place]))",
     "return torch.tanh(self.proj(x[:, 0]))",
     "test_bert.py::test_shared_positions_of_a_left_padded_batch"),
    ("keys and values exchanged in BERT's files", "bert",
     '"attention.part.k_proj": "attention.self.key",\n'
     '    "attention.part.v_proj": "attention.self.value"',
     '"attention.part.k_proj": "attention.self.value",\n'
     '    "attention.part.v_proj": "attention.self.key"',
     "test_bert.py::test_eps_is_that_of_the_file"),
    ("a head in the file is taken in place of a new one", "bert",
     "return kept | {n: t for n, t in own.items() if _part(n) in new}",
     "return {n: t for n, t in own.items() if _part(n) in new} | kept",
     "test_bert.py::test_a_head_in_the_file_gives_way_to_a_new_one"),
    # chapter 12
    ("GPT-2 without its final norm", "model",
     "return self.norm(self.through(x, cache, pos=pos, mask=mask))",
     "return self.through(x, cache, pos=pos, mask=mask)",
     "test_gpt.py::test_gpt2_equals_transformers"),
    ("GPT-1 wired as pre-norm", "gpt",
     "super().__init__(config, PostNorm, nn.Identity)",
     "super().__init__(config, PreNorm, nn.Identity)",
     "test_gpt.py::test_gpt1_is_post_norm_without_a_final_norm"),
    ("positions of a GPT begin again with a cache", "model",
     "pos, Positions.of(pos, ids, cache)",
     "pos, Positions.of(pos, ids, None)",
     "test_gpt.py::test_positions_continue_with_a_cache"),
    ("the square matrix of GPT-2 not transposed", "gpt",
     'if x.ndim == 2 and ".c_" in name else x',
     'if x.ndim == 2 and ".c_" in name and "n.c_p" not in name else x',
     "test_gpt.py::test_gpt2_equals_transformers"),
    ("log-likelihood not shifted", "gpt",
     "logits[:, :-1].float().mT", "logits[:, 1:].float().mT",
     "test_gpt.py::test_log_likelihood_is_the_logarithm_of_probabilities"),
    # the capstone
    ("the capstone does not see rows without keys", "rebuild",
     "dead = not all(x.isfinite().all() for x in _parts(got))",
     "dead = False",
     "test_rebuild.py::test_rows_without_keys_are_watched"),
    ("the capstone does not see what is changed in place", "rebuild",
     "spoiled = before != [x._version for x in given]", "spoiled = False",
     "test_rebuild.py::test_what_is_given_must_not_be_changed"),
    ("the capstone compares with the right version only", "rebuild",
     "if max(far(version)) <= slack)", "if False)",
     "test_rebuild.py::test_every_mistake_is_called_by_its_name"),
    ("a reader's gap is filled for him", "rebuild",
     "others = {name: f for name, f in _FILLED.items() if name != gap}",
     "others = dict(_FILLED)",
     "test_rebuild.py::test_the_empty_one_fails_at_each_gap"),
    ("the capstone's cache is asked before it holds a token", "rebuild",
     "begun = None if cache is None or cache.empty else cache",
     "begun = cache",
     "test_rebuild.py::test_places_of_an_empty_cache_are_asked_without_"
     "one"),
    # chapter 13
    ("scaling of the frequencies ignored", "llama",
     "if config.rope_scaling is None:", "if True:",
     "test_llama.py::test_llama_equals_transformers"),
    ("neighbors paired", "llama",
     "return Rotary(config.head_width, base=config.base)",
     "return Rotary(config.head_width, base=config.base, "
     "layout=\"interleaved\")",
     "test_llama.py::test_llama_equals_transformers"),
    ("max_len counts places instead of positions", "model",
     "expect.at_most(self.max_len, tokens=pos.end)",
     "expect.at_most(self.max_len, tokens=pos.n)",
     "test_model.py::test_more_tokens_than_max_len_are_refused"),
    # chapter 14
    ("a tied output layer counted twice", "costs",
     "if s.head and not s.tied else 0", "if s.head else 0",
     "test_costs.py::test_base_transformer_of_2017_is_63_million"),
    ("a multiply-add counted as one", "costs",
     '"feed-forward": 2 * ff * (s', '"feed-forward": ff * (s',
     "test_costs.py::test_flops_of_an_encoder_decoder"),
    ("as many key heads as query heads in the cache", "costs",
     "return 2 * s.n_kv_heads * s.d_head * rows",
     "return 2 * s.n_heads * s.d_head * rows",
     "test_costs.py::test_cache_of_transformers_in_bytes"),
    ("the batch forgotten in the cache", "costs",
     "rows * batch * dtype.itemsize", "rows * dtype.itemsize",
     "test_costs.py::test_a_window_bounds_the_cache"),
    ("one of AdamW's two means forgotten", "costs",
     '"adamw": 2}', '"adamw": 1}',
     "test_costs.py::test_adamw_takes_16_bytes_either_way"),
    ("weights read once for each row of the batch", "costs",
     "row = flop_parts(sizes, 1, **how)",
     "row = flop_parts(sizes, 1, batch, **how)",
     "test_costs.py::test_a_step_reads_each_weight_once"),
    ("seconds have no small prefixes", "costs",
     '"" if counted else "mµnpf"', '""', "test_costs.py::test_readable"),
    ("nothing beyond exa", "costs",
     '_scaled(n, 1000, "kMGTPEZY",', '_scaled(n, 1000, "kMGTPE",',
     "test_costs.py::test_readable"),
    ("a prefix taken too early", "costs",
     "        if not 0 < n < 0.9995:\n", "        if not 0 < n < 1:\n",
     "test_costs.py::test_readable"),
    ("numpy's numbers stay in the sizes", "costs",
     "object.__setattr__(self, name, int(value))",
     "object.__setattr__(self, name, value)",
     "test_costs.py::test_numbers_of_numpy_neither_overflow_nor_stay"),
    ("numpy's numbers of tokens overflow", "costs",
     "return map(int, asked.values())", "return asked.values()",
     "test_costs.py::test_numbers_of_numpy_neither_overflow_nor_stay"),
    ("a negative past is taken", "costs",
     '0 if name in ("past", "memory") else 1', "-1",
     "test_costs.py::test_tokens_that_cannot_be_are_refused"),
    ("a window without layers is not seen", "costs",
     "self.n_layers * (self.window is not None)", "self.n_layers",
     "test_costs.py::test_numbers_that_cannot_be_are_refused"),
    ("a card may be infinitely slow", "costs",
     'expect.number("(0, inf)", memory', 'expect.number("[0, inf)", memory',
     "test_costs.py::test_a_card_without_speed_is_refused"),
    ("other parts than the family's are let through", "costs",
     "expect.that(has == says", "expect.that(has >= says",
     "test_costs.py::test_parameters_are_exactly_those_of_our_models"),
    # chapter 15
    ("the last start is never drawn", "data",
     "draw.integers(self.n_starts,", "draw.integers(self.n_starts - 1,",
     "test_data.py::test_every_start_is_equally_likely_the_last_included"),
    ("a batch is counted before it is made", "data",
     "batch = self.batch_at(self.taken)\n            self.taken += 1",
     "self.taken += 1\n            batch = self.batch_at(self.taken)",
     "test_data.py::test_packing_asks_for_each_neighbor_once_in_a_pass"),
    ("another corpus goes on", "data",
     "if state[k] != self.facts[k]}", "if False}",
     "test_data.py::test_a_state_of_another_loader_is_refused"),
    ("packed documents see each other", "data",
     "mask = owner[:, None, :, None] == owner[:, None, None, :]",
     "mask = (owner[:, None, :, None] == owner[:, None, None, :]) | True",
     "test_data.py::test_without_a_mask_documents_hear_of_each_other"),
    ("positions of packed documents run on", "data",
     "pos[here], owner[here] = np.arange(size), n",
     "pos[here], owner[here] = at + np.arange(size), n",
     "test_data.py::test_packing_asks_for_each_neighbor_once_in_a_pass"),
    ("padding is counted", "data",
     "for fill in (0, -100, -1)]\n        for i, row",
     "for fill in (0, 0, -1)]\n        for i, row",
     "test_data.py::test_a_pass_pads_each_example_once"),
    ("versions of a text part", "data",
     "near_duplicates(texts, near)", "near_duplicates(texts, 1.0)",
     "test_data.py::test_nothing_held_out_stands_in_the_training_text"),
    # appendix A8
    ("halves of two files are joined", "corpora",
     "headers |= {\"Range\": f\"bytes={start}-\", \"If-Range\": tag}",
     "headers |= {\"Range\": f\"bytes={start}-\", \"If-Range\": '\"two\"'}",
     "test_corpora.py::test_a_broken_download_goes_on_where_it_broke"),
    ("a download is renamed whatever came", "corpora",
     "if size < total:", "if False:",
     "test_corpora.py::test_a_server_without_ranges_sends_all_again"),
    ("a truncated token file is opened", "corpora",
     "size == header.nbytes", "True",
     "test_corpora.py::test_a_foreign_or_truncated_file_is_refused"),
    ("another tokenizer's ids are read", "corpora",
     "or tokenizer_hash(tokenizer) == self.header.tokenizer", "or True",
     "test_corpora.py::test_a_foreign_or_truncated_file_is_refused"),
    ("special tokens in a text are obeyed", "corpora",
     "disallowed_special=()", "allowed_special=\"all\"",
     "test_corpora.py::test_special_tokens_in_a_text_are_text"),
    ("tasks pile up", "tokenizer",
     "if len(waiting) > 2 * processes:", "if len(waiting) > 99:",
     "test_tokenizer.py::test_tasks_come_back_in_order_and_few_are_under_way"),
    # appendix A3
    ("a switch passes for a whole number", "expect",
     "isinstance(value, Integral) or isinstance(value, bool)\n",
     "isinstance(value, Integral)\n",
     "test_expect.py::test_what_is_no_whole_number"),
    ("only Python's own whole numbers are taken", "expect",
     "not isinstance(value, Integral)", "not isinstance(value, int)",
     "test_expect.py::test_whole_numbers"),
    ("the smallest whole number is refused", "expect",
     "or value < least", "or value <= least",
     "test_expect.py::test_whole_from_another_number_on"),
    ("the closed end of an interval taken as open", "expect",
     "at_low and value == low", "False",
     "test_expect.py::test_a_number_lies_in_its_interval"),
    ("the open end of an interval taken as closed", "expect",
     "or at_high and value == high", "or value == high",
     "test_expect.py::test_a_number_lies_in_its_interval"),
    ("a switch passes for a number", "expect",
     "isinstance(value, Real) and not isinstance(value, bool)",
     "isinstance(value, Real)",
     "test_expect.py::test_what_is_a_number_in_no_interval"),
    ("1 passes for True in a choice", "expect",
     "type(value) is type(o) and value == o", "value == o",
     "test_expect.py::test_equal_is_not_enough_for_a_choice"),
    ("what is not so is let through", "expect",
     "    if not ok:\n", "    if ok is False:\n",
     "test_expect.py::test_a_sentence_of_ones_own"),
    ("a class passes for one of its instances", "expect",
     "if not isinstance(value, kinds):",
     "if not (isinstance(value, kinds) or value is kinds):",
     "test_expect.py::test_an_instance_of_a_class"),
    ("fields keep numpy's numbers", "expect",
     "object.__setattr__(config, name, found(value))", "pass",
     "test_expect.py::test_fields_of_numpy_become_json"),
    ("a dropout of 1 is allowed", "expect",
     '"dropout": "[0, 1)"', '"dropout": "[0, 1]"',
     "test_expect.py::test_fields_are_what_their_annotations_say"),
    ("None passes for any field", "expect",
     "if value is None and types.NoneType in wanted:",
     "if value is None:",
     "test_expect.py::test_fields_that_may_be_none"),
    ("key heads need not divide the heads", "expect",
     "n_kv_heads is None or n_heads % n_kv_heads == 0",
     "n_kv_heads is None or n_heads >= n_kv_heads",
     "test_expect.py::test_heads_share_evenly"),
    ("a loose axis does not bind its letter", "expect",
     "if axis[0] == \"#\" and size == 1:", "if axis[0] == \"#\":",
     "test_expect.py::test_shapes_as_broadcasting_has_them"),
    ("an axis does not bind its letter", "expect",
     "else known.setdefault(axis.lstrip(\"#\"), size)",
     "else known.get(axis.lstrip(\"#\"), size)",
     "test_expect.py::test_the_same_letter_is_the_same_number"),
    ("axes before a pattern without a star", "expect",
     "return len(axes) == len(shape)", "return len(axes) <= len(shape)",
     "test_expect.py::test_the_number_of_axes_counts"),
    ("two floating types pass for one", "expect",
     "len(set(kinds)) > 1", "False",
     "test_expect.py::test_floating_types"),
    ("booleans pass for integers", "expect",
     "                x.dtype == torch.bool):", "                False):",
     "test_expect.py::test_integer_types"),
    ("positions of other batches pass", "expect",
     "for pos in named.values()} - {1}) > 1:",
     "for pos in named.values()} - {1}) > 2:",
     "test_expect.py::test_positions"),
    ("a mask of two axes is let through", "expect",
     "1 < mask.ndim < len(shape) > 3", "2 < mask.ndim < len(shape) > 3",
     "test_expect.py::test_masks_that_are_refused"),
    ("a mask may widen the scores", "expect",
     "a != 1 and a != b for a, b", "1 != a != b != 1 for a, b",
     "test_expect.py::test_masks_and_biases_broadcast_as_torch_has_it"),
    ("a lone surrogate passes for text", "expect",
     'value.encode("utf-8")', 'value.encode("utf-8", "surrogatepass")',
     "test_expect.py::test_lone_surrogates_are_no_text"),
    ("a folder passes for a file", "expect",
     "if not found.is_file():", "if not found.exists():",
     "test_expect.py::test_a_file_that_is_there"),
    ("a file is renamed before all are written", "expect",
     """                os.fsync(file.fileno())  # on the disk, not on its way
        for path in writers:
            os.replace(beside[path], path)""",
     """                os.fsync(file.fileno())
            os.replace(beside[path], path)""",
     "test_expect.py::test_a_writer_that_raises_changes_no_file"),
    ("a file is renamed before it is on the disk", "expect",
     "os.fsync(file.fileno())  #", "pass  #",
     "test_expect.py::test_all_is_on_the_disk_before_the_first_rename"),
    ("a file is written in its place", "expect",
     "beside = {path: path.with_name(f\"{path.name}.{os.getpid()}.part\")",
     "beside = {path: path",
     "test_expect.py::test_a_program_that_is_killed_leaves_whole_files"),
    ("half a file is left beside", "expect",
     "path.unlink(missing_ok=True)", "pass",
     "test_expect.py::test_a_writer_that_raises_changes_no_file"),
    # chapter 16
    ("padding counted in the mean of the loss", "optim",
     "loss.where(counted, 0.0).sum() / counted.sum().clamp(min=1)",
     "loss.where(counted, 0.0).mean()",
     "test_optim.py::test_padding_is_never_averaged_in"),
    ("a label outside is taken for the last id", "optim",
     "loss = loss.masked_fill(known != targets, math.nan)", "pass",
     "test_optim.py::test_where_nobody_looks_a_bad_label_gives_nan"),
    ("eps not folded with the correction", "optim",
     '[group["eps"] * s2 for _, s2 in seen]',
     '[group["eps"] for _, s2 in seen]',
     "test_optim.py::test_lists_equal_the_clear_loop"),
    ("decay goes through the step", "optim",
     'if group["weight_decay"] and group["decoupled"]:', "if False:",
     "test_optim.py::test_l2_is_no_decoupled_decay"),
    ("the first warm-up step has factor 0", "optim",
     "return step / peak", "return (step - 1) / peak",
     "test_optim.py::test_no_update_is_wasted"),
    ("embeddings decay", "optim",
     "if p.ndim > 1 and p not in tables]", "if p.ndim > 1]",
     "test_optim.py::test_matrices_decay_and_nothing_else"),
    ("any learning rate will do", "optim",
     '{"lr": "(0, inf)", ', "{",
     "test_optim.py::test_a_bad_learning_rate_is_refused"),
    # chapter 19
    ("replacements are drawn from special tokens too", "mlm",
     "draws.to(ids)[pick]", "draws.to(ids)[pick] + pick % 2",
     "test_mlm.py::test_what_is_drawn_is_even_and_from_the_given_words"),
    ("a random word never replaces", "mlm",
     "fate < blank + swap", "fate < blank",
     "test_mlm.py::test_the_shares_pass_a_chi_square_test"),
    ("labels stand at what is visible", "mlm",
     "torch.where(chosen, ids, -100))", "torch.where(chosen, -100, ids))",
     "test_mlm.py::test_labels_tell_what_stood_there"),
    ("blanks are the same in every pass", "mlm",
     'at = k if self.facts["dynamic"] else self.order[k]',
     "at = self.order[k]",
     "test_mlm.py::test_blanks_are_drawn_anew_and_can_be_drawn_again"),
    ("the second text is of the first segment", "mlm",
     "(seps.cumsum(1) - seps).clamp(max=1))",
     "(seps.cumsum(1) - seps).clamp(max=0))",
     "test_mlm.py::test_two_texts_have_two_segments"),
    ("the least sure are written first", "mlm",
     "1, descending=True).argsort(1)", "1, descending=False).argsort(1)",
     "test_mlm.py::test_the_surest_are_written_first"),
    ("fewer neighbors are not asked", "mlm",
     "range(max(left, right), -1, -1)", "range(max(left, right), 0, -1)",
     "test_mlm.py::test_neighbors_count_as_brute_force_does"),
    # appendix A12
    ("the shortest piece is taken", "wordpiece",
     "range(len(word), start, -1)", "range(start + 1, len(word) + 1)",
     "test_wordpiece.py::test_words_are_cut_as_by_the_library"),
    ("pieces are joined by count", "wordpiece",
     "(n / (single[a] * single[b]), n, (a, b))", "(n, n, (a, b))",
     "test_wordpiece.py::test_the_worth_is_not_the_count"),
    ("every piece bears the label", "wordpiece",
     "n >= 0 and n not in words[:i]", "n >= 0",
     "test_wordpiece.py::test_labels_stand_on_first_pieces"),
    ("half a span will do", "wordpiece",
     "goes_on = found and found[-1].end == i and tag == (",
     "goes_on = found and tag == (",
     "test_wordpiece.py::test_spans_and_tags_go_both_ways"),
    # appendix A10
    ("the hash is not compared", "trained",
     "expect.that(found == told[name],",
     "expect.that(found['bytes'] == told[name]['bytes'],",
     "test_trained.py::test_an_altered_file_is_refused"),
    ("the card leaves a file out", "trained",
     'for name in FILES}}\n    text = json.dumps(card',
     'for name in FILES[:2]}}\n    text = json.dumps(card',
     "test_trained.py::test_what_is_saved_is_loaded"),
    ("a fault of the end is charged to nobody", "trained",
     "        stories.ending(world, beats)", "        stories.World()",
     "test_trained.py::test_the_verdicts_are_the_graders"),
    ("the last word is in no run", "trained",
     "parts = text.split()", "parts = text.split()[:-1]",
     "test_trained.py::test_copies_are_found"),
    # appendix A11
    ("every h is mute", "parallel",
     "word[0].lower() in VOWELS and word not in ASPIRATED",
     "word[0].lower() in VOWELS",
     "test_parallel.py::test_a_pair_written_by_hand_comes_out_to_the_letter"),
    ("contraction before elision", "parallel",
     "if word in ELIDED and vowel_first(after):",
     "if (done[-1], word) not in CONTRACTED and word in ELIDED and "
     "vowel_first(after):",
     "test_parallel.py::test_a_pair_written_by_hand_comes_out_to_the_letter"),
    ("a participle agrees with an object that comes later", "parallel",
     "elif clause.pronoun and clause.pronoun.direct:\n"
     "        who = clause.pronoun",
     "elif clause.object or clause.pronoun:\n"
     "        who = clause.object or clause.pronoun",
     "test_parallel.py::test_a_pair_written_by_hand_comes_out_to_the_letter"),
    ("what is held out is read in the object", "parallel",
     "+ 7 * FRAMES.index(frame)) % 10 == 0",
     "+ 7 * FRAMES.index(frame)) % 10 == 0 and frame != 'object'",
     "test_parallel.py::test_one_combination_in_ten_is_held_out"),
    ("an empty side is read", "parallel",
     "    expect.that(said and \"\\r\" not in said, f\"{path}",
     "    expect.that(\"\\r\" not in said, f\"{path}",
     "test_parallel.py::test_a_bad_table_is_refused_with_its_line"),
    # appendix A9
    ("a folder is filled in its own place", "checkpoints",
     'folder.with_name(f"{folder.name}.{os.getpid()}.part")', "folder",
     "test_checkpoints.py::test_a_folder_appears_at_once"),
    ("the best checkpoint is forgotten", "checkpoints",
     "{*self.steps()[-self.keep:], self.best}",
     "{*self.steps()[-self.keep:]}",
     "test_checkpoints.py::test_the_last_few_and_the_best_stay"),
    ("NumPy's chance is not put back", "checkpoints",
     "    np.random.set_state((name", "    tuple((name",
     "test_checkpoints.py::test_chance_is_put_back_through_files"),
    ("a line that was cut is read", "checkpoints",
     ' if line.endswith("\\n")]', "]",
     "test_checkpoints.py::test_a_line_that_was_cut_is_left_out"),
    # chapter 17
    ("a mean of means", "train",
     "* (n / sum(counts))", "* (1 / len(counts))",
     "test_train.py::test_parts_add_up_to_the_whole"),
    ("gradients of the step before", "train",
     "    model.zero_grad()\n    mean =", "    mean =",
     "test_train.py::test_a_trainer_is_the_loop_by_hand"),
    ("looking uses up chance", "checkpoints",
     "        set_random_state(chance)", "        pass",
     "test_train.py::test_looking_leaves_no_trace"),
    ("the weights move before the watch looks", "train",
     "    if watch is not None and (problem",
     "    [o.step() for o in optimizers]\n"
     "    if watch is not None and (problem",
     "test_train.py::test_a_nan_stops_before_the_weights_move"),
    ("the history is not cut off", "train",
     "            self.history.until(self.step)", "            pass",
     "test_train.py::test_any_batches_are_taken_up"),
    # chapter 18
    ("a target has no end", "translation",
     "[[self.first + i for i in row] + [self.end]",
     "[[self.first + i for i in row]",
     "test_translation.py::test_texts_come_back"),
    ("the memory's padding is seen", "translation",
     "memory_mask=batch.mask)", "memory_mask=batch.mask | True)",
     "test_translation.py::test_the_loss_is_that_of_sentences_alone"),
    ("an empty second side passes", "translation",
     "and pair[at].strip(), f", "and True, f",
     "test_translation.py::test_what_is_no_pair_is_refused"),
    ("a checkpoint is left out of the mean", "translation",
     "[p.double() for p in parts]", "[p.double() for p in parts[1:]]",
     "test_translation.py::test_the_average_is_that_of_torch"),
    ("forced tokens are not written", "translation",
     "best = given.where(given >= 0, best)", "best = best + 0 * given",
     "test_translation.py::test_forced_tokens_are_written_and_read"),
    ("translations come back in another order", "translation",
     "zip(some, ids.tolist())", "zip(sorted(some), ids.tolist())",
     "test_translation.py::test_alone_or_in_a_batch"),
    # chapter 20
    ("the id that crosses p is dropped", "sampling",
     "(before < need).sum(-1, keepdim=True) - 1",
     "((before + taken <= need).sum(-1, keepdim=True) - 1).clamp(min=0)",
     "test_sampling.py::test_the_smallest_set_has_the_crossing_id_and_no_more"),
    ("a short list is taken for the whole", "sampling",
     "if n < keys.shape[-1]:", "if False:",
     "test_sampling.py::test_a_long_vocabulary_equals_float64"),
    ("negative logits rise", "sampling",
     "torch.where(old > 0, old / penalty, old * penalty)", "old / penalty",
     "test_sampling.py::test_repetition_equals_transformers"),
    ("what is nothing counts as id 0", "sampling",
     "one = (ids >= 0).to(logits.dtype)",
     "one = torch.ones_like(ids).to(logits.dtype)",
     "test_sampling.py::test_counting_penalties_equal_loops"),
    ("one generator for the batch", "sampling",
     "for _, g in self.rows]).to(", "for g in [self.rows[0][1]] * b]).to(",
     "test_sampling.py::test_a_row_does_not_know_its_neighbors"),
    ("ties beyond the short list are forgotten", "sampling",
     "    if len(far):", "    if False:",
     "test_sampling.py::test_a_short_list_draws_ties_beyond_it"),
    ("a row that was kept shares its generator", "sampling",
     "(s, g.clone_state()) for s, g in kept", "(s, g) for s, g in kept",
     "test_sampling.py::test_a_row_kept_twice_goes_on_the_same_way_twice"),
    ("temperature after the filters", "sampling",
     "_by_rank(temperature(logits, settings.temperature), settings)",
     "temperature(_by_rank(logits, settings), settings.temperature)",
     "test_sampling.py::test_all_together_equal_the_list_of_transformers"),
]]

BLAMELESS = {"ImportError", "ModuleNotFoundError", "NameError",
             "SyntaxError", "IndentationError", "UnboundLocalError"}
LIMIT = 900         # seconds for the tests of one copy


def mutated(mutation):
    "The module's source with the replacement."
    path = ROOT / "tformer" / f"{mutation.module}.py"
    source = path.read_text(encoding="utf-8")
    count = source.count(mutation.old)
    if count != 1:
        raise ValueError(f"{path.name} has {count} times: {mutation.old}")
    return source.replace(mutation.old, mutation.new)


# the process that forks, and its forks

def preload(files):
    "Import what the tests import, except the package and the tests."
    local = {"tformer", *(p.stem for p in files[0].parent.glob("*.py"))}
    import pytest  # noqa: F401
    for path in files:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = ([node.module or "."] if isinstance(node, ast.ImportFrom)
                     else [a.name for a in node.names]
                     if isinstance(node, ast.Import) else [])
            for name in names:
                if name.split(".")[0] not in local:
                    exec(compile(ast.Module([node], []), path.name, "exec"),
                         {})


class Log:
    "What the tests did: the plugin of a fork."

    def __init__(self):
        self.passed, self.failed, self.broken = [], [], []

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken.append(f"{report.nodeid}: {report.longrepr}")

    def pytest_runtest_logreport(self, report):
        if report.failed and report.when != "call":
            self.broken.append(f"{report.nodeid}: {report.longrepr}")
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_exception_interact(self, node, call, report):
        if getattr(report, "when", None) == "call":
            self.failed.append([node.nodeid, call.excinfo.typename,
                                str(call.excinfo.value)[:300]])


def run_tests(folder, tests, fast):
    "Run tests in this process against the package in `folder`."
    import pytest
    from hypothesis import Phase, settings
    settings.register_profile("mutants", database=None, phases=[
        Phase.explicit, Phase.generate])        # a failure is enough
    settings.load_profile("mutants")
    assert not any(m.split(".")[0] == "tformer" for m in sys.modules)
    os.chdir(folder)
    sys.path.insert(0, folder)
    log = Log()
    code = pytest.main([
        "-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception",
        "-p", "_hypothesis_pytestplugin", "--tb=short", "--rootdir", folder,
        *(["-x"] if fast else []), *(f"tests/{t}" for t in tests)], [log])
    files = [m.__file__ for name, m in sys.modules.items()
             if name.split(".")[0] == "tformer"]
    return {"code": int(code), "files": files, **vars(log)}


def fork(task):
    "The result of one task, computed by a child that then ends."
    answer, output = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT)
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        try:
            result = run_tests(**task)
        except BaseException as error:
            result = {"died": repr(error)}
        answer.write(json.dumps(result).encode())
        answer.flush()
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    for file in (answer, output):
        file.seek(0)
    text = answer.read().decode()
    result = json.loads(text) if text else {"died": f"status {status}"}
    return {**result, "output": output.read().decode(errors="replace")[-4000:]}


def serve():
    "Answer every line of the input, a task, by a line: its result."
    sys.dont_write_bytecode = False     # what is not changed is kept
    folder = Path(sys.argv[1])
    sys.path[:] = [p for p in sys.path if p != str(Path(__file__).parent)]
    preload([folder / "tests" / name for name in sys.argv[2:]])
    gc.collect()
    gc.freeze()         # a child's collections need not copy all of it
    for line in sys.stdin:
        print(json.dumps(fork(json.loads(line))), flush=True)


# the tests

FILES = sorted({m.test.split("::")[0] for m in MUTATIONS})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A copy of the package and of the tests."
    folder = tmp_path_factory.mktemp("mutants")
    for name in ("tformer", "tests"):
        shutil.copytree(ROOT / name, folder / name,
                        ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def ask(folder):
    "Runs tests against the copy as it is, and tells what happened."
    if not hasattr(os, "fork"):
        pytest.skip("needs a system that forks")
    env = {k: v for k, v in os.environ.items()
           if k not in ("TFORMER_SHAPES", "PYTEST_ADDOPTS")
           and not k.startswith("PYTEST_XDIST")}
    server = subprocess.Popen(
        [sys.executable, __file__, folder, *FILES], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**env, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
             "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})

    def ask(tests, fast=True):
        task = {"folder": str(folder), "tests": tests, "fast": fast}
        server.stdin.write(json.dumps(task) + "\n")
        server.stdin.flush()
        result = json.loads(server.stdout.readline())
        assert "died" not in result, result["died"] + result["output"]
        assert result["files"], "the package was not imported"
        for file in result["files"]:
            assert Path(file).parent == folder / "tformer"
        assert not result["broken"], result["broken"]
        return result

    yield ask
    server.stdin.close()
    assert server.wait() == 0


def write(path, source):
    """Change a module; what was compiled of it goes.

    Python would take that for current: the same second, the same size.
    Of all other modules and of the tests it is used again.
    """
    path.write_text(source, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def check(mutation, folder, ask):
    "Change the copy, run the test, change it back; it must have failed."
    path = folder / "tformer" / f"{mutation.module}.py"
    source = path.read_text(encoding="utf-8")
    write(path, mutated(mutation))
    try:
        result = ask([mutation.test])
    finally:
        write(path, source)
    assert result["code"] == 1 and result["failed"], (
        f"{mutation.test} stays green: {result['output']}")
    for node, kind, message in result["failed"]:
        assert f"{node}[".startswith(f"tests/{mutation.test}[")
        assert kind not in BLAMELESS, f"{kind}: {message}"


def test_nothing_is_red_without_a_change(ask):
    tests = sorted({m.test for m in MUTATIONS})
    result = ask(tests, fast=False)
    assert result["code"] == 0 and not result["failed"], result["output"]
    for test in tests:
        assert any(f"{p}[".startswith(f"tests/{test}[")
                   for p in result["passed"]), f"{test} did not run"


@pytest.mark.parametrize("mutation", MUTATIONS,
                         ids=[m.name for m in MUTATIONS])
def test_a_change_is_seen(mutation, folder, ask):
    check(mutation, folder, ask)


HERE = "test_attend.py::test_i_love_ai"


@pytest.mark.parametrize("row, says", [
    (("attend", "def softmax(", "def softmax(", HERE), "stays green"),
    (("attend", "def softmax(", "def sofmax(", HERE), "ImportError"),
    (("attend", "def softmax(", "def (", HERE), "SyntaxError"),
    (("attend", "weights = softmax(scores)", "weights = sotfmax(scores)",
      HERE), "NameError"),
    (("attend", "def softmax(", "def softmax(", HERE + "_not"), "not found"),
    (("attend", "no such text", "", HERE), "has 0 times: no such text"),
    (("attend", "import", "", HERE), "times: import")])
def test_what_is_no_proof_is_refused(row, says, folder, ask):
    with pytest.raises((AssertionError, ValueError), match=says):
        check(Mutation("", *row), folder, ask)


def test_names_of_mutations_are_different():
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)


if __name__ == "__main__":
    serve()

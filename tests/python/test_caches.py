"""Layers with the caches of transformers and flash-linear-attention; skipped where these are not installed."""

import copy
import importlib.util
import pickle
import unittest
import warnings

import torch
from support import assert_close

from efla.layers import EFLA, GatedDeltaNet, GatedDeltaProduct, KimiDeltaAttention


def stack():
    torch.manual_seed(0)
    return [
        EFLA(hidden_size=24, num_heads=2, layer_idx=0),
        GatedDeltaNet(hidden_size=24, head_dim=8, num_heads=2, layer_idx=2),
        KimiDeltaAttention(hidden_size=24, head_dim=8, num_heads=2, layer_idx=1),
        GatedDeltaProduct(hidden_size=24, head_dim=8, num_heads=2, layer_idx=3),
    ]


def run(layers, x, cache, use_cache=True):
    for layer in layers:
        x, _, cache = layer(x, past_key_values=cache, use_cache=use_cache)
    return x, cache


class Caches(unittest.TestCase):
    def check(self, cache):
        layers, x = stack(), torch.randn(2, 9, 24)
        with torch.no_grad():
            expected, _ = run(layers, x, {})
            parts = []
            for begin, end in ((0, 0), (0, 5), (5, 6), (6, 9)):
                y, got = run(layers, x[:, begin:end], cache)
                self.assertIs(got, cache)
                parts.append(y)
        assert_close(self, torch.cat(parts, 1), expected, what=type(cache).__name__)
        self.assertEqual(cache.get_seq_length(), 9)
        return layers

    @unittest.skipUnless(importlib.util.find_spec("transformers"), "transformers is not installed")
    def test_of_transformers(self):
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        cache = DynamicCache()
        layers = self.check(cache)
        x = torch.randn(2, 1, 24)
        with torch.no_grad():
            for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
                assert_close(self, run(layers, x, again)[0], run(layers, x, copy.deepcopy(cache))[0])
            swapped = copy.deepcopy(cache)
            swapped.reorder_cache(torch.tensor([1, 0]))
            assert_close(self, run(layers, x.flip(0), swapped)[0], run(layers, x, cache)[0].flip(0))
            swapped.reset()
            assert_close(self, run(layers, x, swapped)[0], run(layers, x, {})[0])
        self.assertEqual(swapped.get_seq_length(), 1)
        with self.assertRaisesRegex(NotImplementedError, "a recurrent state cannot be cropped"):
            cache.crop(-1)

        other = DynamicCache()
        other.update(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4), 0)
        self.assertIsInstance(other.layers[0], DynamicLayer)
        with self.assertRaisesRegex(ValueError, "past_key_values: got a DynamicLayer with tokens at 0, expected an empty layer"):
            run(layers, x, other)

    @unittest.skipUnless(importlib.util.find_spec("fla"), "flash-linear-attention is not installed")
    def test_of_flash_linear_attention(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no GPU
            from fla.models.utils import Cache
        self.check(Cache())

    def test_of_another_kind(self):
        with self.assertRaisesRegex(ValueError, "past_key_values: got list, expected a dict, flash-linear-attention's Cache"):
            stack()[0](torch.zeros(1, 2, 24), past_key_values=[])


if __name__ == "__main__":
    unittest.main()

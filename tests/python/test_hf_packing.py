"""Packed texts in the models of efla.hf: every way to say where a text begins; skipped without transformers."""

import importlib.util
import tempfile
import unittest

import torch
from support import assert_close, enlarge_weights, import_hf

LENGTHS = (13, 1, 21)
SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 48}
ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2}
CASES = [
    ("EflaConfig", {}),
    ("EflaConfig", {"mixer": "softmax"}),
    ("EflaConfig", {"mixer": "efla-kda", "use_short_conv": False}),
    ("DeltaNetConfig", {"attn": ATTENTION}),
    ("GatedDeltaNetConfig", {"head_dim": 16, "num_v_heads": 4, "attn": ATTENTION}),
    ("KDAConfig", {"head_dim": 16}),
]


@unittest.skipUnless(importlib.util.find_spec("transformers"), "transformers is not installed")
class PackedTexts(unittest.TestCase):
    def setUp(self):
        self.transformers, self.hf = import_hf()
        generator = torch.Generator().manual_seed(1)
        self.texts = [torch.randint(61, (1, length), generator=generator) for length in LENGTHS]
        self.ids = torch.cat(self.texts, 1)
        self.ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)

    def models(self):
        for name, fields in CASES:
            torch.manual_seed(0)
            model = self.transformers.AutoModelForCausalLM.from_config(getattr(self.hf, name)(**SMALL, **fields)).eval()
            enlarge_weights(model)
            yield f"{name} {fields}", model

    def ways(self):
        """Yields a name and the keywords of each collator of flash-linear-attention and transformers."""
        number = torch.cat([torch.full([length], i) for i, length in enumerate(LENGTHS)]).unsqueeze(0).int()
        ends = {"cu_seq_lens_q": self.ends, "cu_seq_lens_k": self.ends, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
        yield "fla's", {"cu_seqlens": self.ends}
        yield "positions", {"position_ids": self.positions}
        yield "seq_idx", {"seq_idx": number}
        yield "all of transformers'", {"position_ids": self.positions, "seq_idx": number, **ends}
        yield "with a mask", {"position_ids": self.positions, "attention_mask": torch.ones_like(self.ids)}

    def test_are_computed_as_alone(self):
        for name, model in self.models():
            with torch.no_grad():
                alone = torch.cat([model(text).logits for text in self.texts], 1)
            for way, keywords in self.ways():
                model.zero_grad()
                out = model(self.ids, labels=self.ids, output_hidden_states=True, **keywords)
                assert_close(self, out.logits, alone, factor=4, what=f"{name} {way}")
                self.assertEqual(out.hidden_states[1].shape, (1, sum(LENGTHS), 32))
                out.loss.backward()
                gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
                model.gradient_checkpointing_enable()
                model.train().zero_grad()
                model(self.ids, labels=self.ids, **keywords).loss.backward()
                model.eval().gradient_checkpointing_disable()
                for n, p in model.named_parameters():
                    assert_close(self, p.grad, gradients[n], factor=20, what=f"{name} {way} {n}")

    def test_of_a_batch_with_padding(self):
        ids = torch.stack([self.ids[0], self.ids[0].flip(0)])
        positions = torch.stack([self.positions[0], torch.arange(sum(LENGTHS))])
        mask = torch.ones_like(ids)
        padded = torch.nn.functional.pad(ids, (3, 2)), torch.nn.functional.pad(positions, (3, 2), value=1)
        padded_mask = torch.nn.functional.pad(mask, (3, 2))
        for name, model in self.models():
            with torch.no_grad():
                expected = torch.stack([torch.cat([model(text).logits for text in self.texts], 1)[0], model(ids[1:]).logits[0]])
                assert_close(self, model(ids, position_ids=positions).logits, expected, factor=4, what=name)
                got = model(padded[0], position_ids=padded[1], attention_mask=padded_mask).logits
                assert_close(self, got[:, 3:-2], expected, factor=4, what=f"{name} padded")

    def test_positions_of_one_text_pack_nothing(self):
        mask = torch.ones_like(self.ids)
        mask[:, 5:8] = 0
        positions = torch.arange(sum(LENGTHS)).unsqueeze(0)
        for name, model in self.models():
            with torch.no_grad():
                for given in (None, mask):
                    expected = model(self.ids, attention_mask=given).logits
                    for moved in (positions, positions + 7):
                        got = model(self.ids, attention_mask=given, position_ids=moved).logits
                        seen = slice(None) if given is None else given.bool()
                        assert_close(self, got[seen], expected[seen], factor=4, what=name)

    def test_models_of_flash_linear_attention_agree(self):
        if importlib.util.find_spec("fla") is None:
            self.skipTest("flash-linear-attention is not installed")
        import efla.fla  # noqa: F401
        import fla.models

        for name, fields in (("DeltaNet", {}), ("GatedDeltaNet", {"head_dim": 16}), ("KDA", {"head_dim": 16})):
            theirs = getattr(fla.models, f"{name}ForCausalLM")(getattr(fla.models, f"{name}Config")(**SMALL, **fields)).eval()
            with tempfile.TemporaryDirectory() as folder:
                theirs.save_pretrained(folder)
                ours = getattr(self.hf, f"{name}ForCausalLM").from_pretrained(folder).eval()
            with torch.no_grad():
                expected = theirs(self.ids, cu_seqlens=self.ends, use_cache=False).logits
                assert_close(self, ours(self.ids, cu_seqlens=self.ends).logits, expected, factor=4, what=name)

    def test_what_is_refused(self):
        _, model = next(self.models())
        mask = torch.ones_like(self.ids)
        mask[0, 3] = 0
        two = self.ids.repeat(2, 1)
        ends = self.ends
        for ids, keywords, message in (
            (two, {"cu_seqlens": ends}, "cu_seqlens: got a batch of 2, expected texts packed into a batch of 1"),
            (self.ids, {"cu_seqlens": ends[:-1]}, "cu_seqlens: got [0, 13, 14], expected ends of sequences that rise from 0 to T = 35"),
            (self.ids, {"cu_seq_lens_q": ends.float()}, "cu_seq_lens_q: got torch.float32, expected torch.int64 or torch.int32"),
            (self.ids, {"cu_seqlens": ends, "attention_mask": mask}, "cu_seqlens: got padding in attention_mask too, expected no padding"),
            (
                self.ids,
                {"cu_seq_lens_q": ends, "cu_seq_lens_k": torch.tensor([0, 35])},
                "cu_seq_lens_k: got [0, 35], expected the other keyword's [0, 13, 14, 35]",
            ),
            (self.ids, {"position_ids": self.positions[:, 1:]}, "position_ids: got shape [1, 34], expected [B, T] = [1, 35]"),
            (self.ids, {"cu_seqlens": ends, "use_cache": True}, "use_cache: got a cache for packed texts, expected use_cache=False"),
            (self.ids, {"position_ids": self.positions, "use_cache": True}, "use_cache: got a cache for packed texts"),
            (self.ids, {"cu_seqlen": ends}, "cu_seqlen: got a tensor of shape [4], expected no such keyword"),
            (self.ids, {"attention_mask": torch.ones(1, 1, 35, 35)}, "attention_mask: got shape [1, 1, 35, 35], expected a tensor [B, T]"),
            (self.ids, {"inputs_embeds": torch.zeros(1, 35, 32)}, "input_ids: got both or neither of input_ids and inputs_embeds"),
        ):
            with self.assertRaises(ValueError) as caught:
                model(ids, **keywords)
            self.assertTrue(str(caught.exception).startswith(f"model: {message}"), caught.exception)


if __name__ == "__main__":
    unittest.main()

"""Sizes of the pools: the catalogue, the split of the memory by hand, own models, the commands."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvcache import CacheConfig, CapacityError, InvalidInputError, KeyBatch, KVCacheManager
from kvcache.cli import main
from kvcache.sizing import ModelShape, catalogue, load_model, parse_bytes, size_pools
from kvcache.sizing.catalogue import Layers

GIB = 2**30
# full layers: 1 * 2 * 1 * 4 elements, 8 bytes a token in fp8; sliding: 2 layers, 16 bytes
TINY = ModelShape("tiny", 8, Layers(1, 1, 4), Layers(2, 1, 4))


def sizes(memory: int, **options: Any) -> tuple[int, int]:
    found = size_pools(
        TINY, memory, **{"kv": "fp8", "page_size": 4, "chunk": 8, "running": 2, **options}
    )
    return found.full_pages, found.swa_pages


class TestCatalogue:
    @pytest.mark.parametrize(
        ("name", "window", "layers", "full", "swa"),
        [
            # bf16: layers * 2 (K, V) * kv_heads * head_dim * 2 bytes
            ("gpt-oss-20b", 128, (12, 12), 24_576, 24_576),
            ("gpt-oss-120b", 128, (18, 18), 36_864, 36_864),
            ("gemma-3-1b", 512, (4, 22), 4_096, 22_528),
            ("gemma-3-4b", 1024, (5, 29), 20_480, 118_784),
            ("gemma-3-12b", 1024, (8, 40), 65_536, 327_680),
            ("gemma-3-27b", 1024, (10, 52), 81_920, 425_984),
            ("gemma-2-2b", 4096, (13, 13), 53_248, 53_248),
            ("gemma-2-9b", 4096, (21, 21), 172_032, 172_032),
            ("gemma-2-27b", 4096, (23, 23), 188_416, 188_416),
            ("command-r7b", 4096, (8, 24), 32_768, 98_304),
            ("olmo-3-7b", 4096, (8, 24), 131_072, 393_216),
        ],
    )
    def test_bytes_of_a_token(
        self, name: str, window: int, layers: tuple[int, int], full: int, swa: int
    ) -> None:
        model = load_model(name)
        assert model.swa is not None
        assert (model.name, model.window) == (name, window)
        assert (model.full.layers, model.swa.layers) == layers
        assert (model.full_token_bytes("bf16"), model.swa_token_bytes("fp16")) == (full, swa)
        assert (model.full_token_bytes("fp8"), model.swa_token_bytes("fp8")) == (
            full // 2,
            swa // 2,
        )

    def test_every_model_is_loaded_by_its_name_and_has_a_source(self) -> None:
        models = catalogue()
        assert len(models) == 11
        for name, model in models.items():
            assert load_model(name) == model
            assert model.source

    @pytest.mark.parametrize(
        ("tp", "expected"), [(1, 36_864), (2, 18_432), (8, 4_608), (16, 4_608), (64, 4_608)]
    )
    def test_ranks_share_the_heads_and_hold_one_at_least(self, tp: int, expected: int) -> None:
        assert load_model("gpt-oss-120b").full_token_bytes("bf16", tp) == expected

    def test_a_latent_is_on_every_rank(self) -> None:
        layers = Layers(61, latent_dim=576)
        assert layers.token_bytes("bf16") == layers.token_bytes("bf16", 8) == 61 * 576 * 2

    @pytest.mark.parametrize("tp", [3, 6, 12])
    def test_ranks_that_cannot_share_the_heads(self, tp: int) -> None:
        with pytest.raises(
            InvalidInputError, match=rf"^tp must divide kv_heads \(8\) or .*, got {tp}$"
        ):
            load_model("gpt-oss-120b").full_token_bytes("bf16", tp)

    def test_an_unknown_dtype(self) -> None:
        with pytest.raises(
            InvalidInputError, match=r"^kv must be one of fp8, bf16, fp16, got 'fp4'$"
        ):
            load_model("gpt-oss-120b").full_token_bytes("fp4")


class TestOwnModel:
    def load(self, folder: Path, content: Any) -> ModelShape:
        path = folder / "mine.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return load_model(str(path))

    def test_a_file_like_the_catalogue(self, tmp_path: Path) -> None:
        kind = {"layers": 3, "kv_heads": 2, "head_dim": 5}
        mine = self.load(
            tmp_path, {"window": 7, "full": {"layers": 4, "latent_dim": 6}, "swa": kind}
        )
        assert mine == ModelShape("mine", 7, Layers(4, latent_dim=6), Layers(3, 2, 5))
        named = self.load(tmp_path, {"name": "other", "source": "me", "full": kind})
        assert named == ModelShape("other", None, Layers(3, 2, 5), None, "me")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "must be JSON: "),
            ("[1]", r" must be an object, got \[1\]$"),
            ({"fulll": 1}, ": keys must be of full, name, source, swa, window, got 'fulll'$"),
            ({}, ": full must be an object, got None$"),
            ({"full": {"layers": 1}}, r": full\.kv_heads must be given$"),
            ({"full": {"latent_dim": 1}}, r": full\.layers must be given$"),
            (
                {"full": {"layers": 1, "latent_dim": 4, "kv_heads": 1}},
                ": full: kv_heads must be left out beside latent_dim$",
            ),
            (
                {"full": {"layers": 0, "kv_heads": 1, "head_dim": 1}},
                r": full\.layers must be in \[1, 1048576\], got 0$",
            ),
            (
                {"full": {"layers": True, "kv_heads": 1, "head_dim": 1}},
                r": full\.layers must be an int, got True$",
            ),
            ({"window": 4, "full": {}}, ": window and swa must be given together, got no swa$"),
            ({"swa": {}, "full": {}}, ": window and swa must be given together, got no window$"),
            ({"window": "8", "swa": {}, "full": {}}, ": window must be an int, got '8'$"),
            ({"name": 3, "full": {}}, ": name must be a string, got 3$"),
        ],
    )
    def test_what_it_says_wrong_is_named(self, tmp_path: Path, content: Any, message: str) -> None:
        with pytest.raises(InvalidInputError, match=f"^{tmp_path / 'mine.json'}.*{message}"):
            self.load(tmp_path, content)

    def test_no_such_model_or_file(self, tmp_path: Path) -> None:
        with pytest.raises(
            InvalidInputError, match=r"^model must be one of gpt-oss-20b, .*, got 'gpt-4'$"
        ):
            load_model("gpt-4")
        nowhere = tmp_path / "no.json"
        with pytest.raises(InvalidInputError, match=f"^{nowhere}: cannot be read: No such file"):
            load_model(str(nowhere))


class TestMemory:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("1", 1),
            ("40GiB", 40 * GIB),
            ("40 gb", 40 * 10**9),
            ("1.5TiB", 3 * 2**39),
            ("0.1KB", 100),
            ("0.3KiB", 307),
            (" 7B ", 7),
        ],
    )
    def test_units(self, text: str, expected: int) -> None:
        assert parse_bytes(text) == expected

    @pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e3", "40G", "40 Gibi", "1.", "٣GB"])
    def test_other_words(self, text: str) -> None:
        with pytest.raises(
            InvalidInputError, match=r"^memory must be like 40GiB, 40GB or a number"
        ):
            parse_bytes(text)

    @pytest.mark.parametrize("text", ["0", "0.1", "2000000000GiB"])
    def test_amounts_out_of_range(self, text: str) -> None:
        with pytest.raises(InvalidInputError, match=r"^memory must be in \[1, "):
            parse_bytes(text)


class TestSplit:
    # a page takes 32 bytes in the Full pool, 64 in the SWA pool, 96 in both. A row needs 2 * 2 + 3 = 7 SWA
    # pages, the chunk 2: two rows and the chunk 16, with page 0 17, so 1,632 bytes with the Full pages beside

    def test_the_least_memory_holds_what_runs(self) -> None:
        assert sizes(1632) == (16, 16)
        with pytest.raises(
            CapacityError,
            match=r"^memory must be at least 1,632 bytes for 2 running requests, got 1,631, which holds 1$",
        ):
            sizes(1631)

    def test_the_rest_holds_two_windows_for_each_cached_request(self) -> None:
        # 64 cached tokens: 16 pages; two windows of 3 pages. 16 * 32 + 6 * 64 = 896 bytes more: one of each
        assert sizes(1632 + 896, cached_len=64) == (16 + 16, 16 + 6)
        assert sizes(1632 + 10 * 896, cached_len=64) == (16 + 160, 16 + 60)

    def test_what_a_pool_cannot_use_goes_to_the_other(self) -> None:
        # 31 bytes are no page
        assert sizes(1632 + 896 + 31, cached_len=64) == (32, 22)
        assert sizes(1632 + 896 + 32, cached_len=64) == (33, 22)

    def test_there_are_never_more_swa_pages_than_full_pages(self) -> None:
        # one cached page of 4 tokens would have 6 SWA pages
        assert sizes(96 * 101, cached_len=1) == (100, 100)
        assert sizes(96 * 101 + 32, cached_len=1) == (101, 100)

    def test_a_share_is_one_of_the_whole_memory(self) -> None:
        # a tenth of 9,600 bytes: 15 pages with page 0; 8,640 bytes are 270 Full pages with page 0
        assert sizes(9600, swa_share=0.1) == (269, 14)
        found = size_pools(TINY, 9600, kv="fp8", page_size=4, chunk=8, running=2, swa_share=0.1)
        assert (found.full_tokens, found.swa_tokens) == (1076, 56)
        assert (found.full_bytes, found.swa_bytes) == (8640, 960)
        assert found.running_fit == 1  # 14 pages, 2 for the chunk, 7 for each row

    def test_a_share_that_lets_no_request_run(self) -> None:
        # 7 + 2 pages and page 0 are 640 bytes; as many Full pages 320
        with pytest.raises(
            CapacityError,
            match=r"^swa_share must be in \[0\.0667, 0\.9667\] for one running request in 9,600 bytes, got ",
        ):
            sizes(9600, swa_share=0.06)
        assert sizes(9600, swa_share=640 / 9600) == (279, 9)

    @pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2.0, float("nan")])
    def test_a_share_that_is_none(self, share: float) -> None:
        with pytest.raises(InvalidInputError, match=r"^swa_share must be in \(0, 1\), got "):
            sizes(9600, swa_share=share)

    def test_a_model_without_sliding_layers_has_one_pool(self) -> None:
        model = ModelShape("full", None, Layers(1, 1, 4), None)
        found = size_pools(model, 1000, kv="fp8", page_size=4)
        assert (found.full_pages, found.swa_pages, found.full_bytes, found.swa_bytes) == (
            30,
            0,
            992,
            0,
        )
        with pytest.raises(CapacityError, match=r"^memory must be at least 64 bytes, got 63$"):
            size_pools(model, 63, kv="fp8", page_size=4)
        with pytest.raises(
            InvalidInputError, match=r"^swa_share: full has no sliding-window layers"
        ):
            size_pools(model, 1000, swa_share=0.5)

    def test_token_slots_stay_int32(self) -> None:
        found = size_pools(load_model("gemma-3-1b"), 2**60)
        most = (2**31 - 1) // 64 - 1
        assert (found.full_pages, found.swa_pages) == (most, most)

    @pytest.mark.parametrize("name", catalogue())
    @pytest.mark.parametrize("memory", [24 * GIB, 80 * GIB])
    @pytest.mark.parametrize("kv", ["fp8", "bf16"])
    def test_the_memory_is_used_to_the_last_page_and_the_config_is_taken(
        self, name: str, memory: int, kv: str
    ) -> None:
        model = load_model(name)
        found = size_pools(model, memory, kv=kv, running=2)
        used = found.full_bytes + found.swa_bytes
        assert (
            memory - 64 * (model.full_token_bytes(kv) + model.swa_token_bytes(kv)) < used <= memory
        )
        assert found.running_fit >= 2
        config = eval(found.config_line(131_072).replace('device="cuda"', 'device="cpu"'))
        assert isinstance(config, CacheConfig)
        assert (config.full_pages, config.swa_pages) == (found.full_pages, found.swa_pages)
        assert config.max_len == min(131_072, found.full_tokens)


class TestNeed:
    """What a running request needs at most is enough: no call is ever refused for want of SWA pages."""

    @pytest.mark.parametrize("seed", range(8))
    def test_rows_run_in_what_they_need(self, seed: int) -> None:
        rng = Random(seed)
        page_size, window = rng.choice([1, 2, 4, 8]), rng.choice([1, 3, 8, 13, 20])
        running, chunk = rng.randint(1, 4), rng.randint(1, 40)
        model = ModelShape("any", window, Layers(1, 1, 4), Layers(1, 1, 4))
        page = 2 * 8 * page_size
        need = running * (2 * -(-window // page_size) + 3) + -(-chunk // page_size)
        found = size_pools(
            model,
            (need + 1) * page,
            kv="fp8",
            page_size=page_size,
            running=running,
            chunk=chunk,
        )
        assert (found.swa_pages, found.running_fit) == (need, running)
        cache = KVCacheManager(
            CacheConfig(page_size, window, 2000, found.swa_pages, max_rows=running, max_len=400)
        )
        self.run(cache, rng, chunk)

    def run(self, cache: KVCacheManager, rng: Random, chunk: int) -> None:
        """Serve random requests that share prefixes, for a hundred steps."""
        old: list[list[int]] = []
        tokens: dict[int, list[int]] = {}
        computed: dict[int, int] = {}
        for _ in range(100):
            if len(tokens) < cache.config.max_rows:
                base = rng.choice(old)[: rng.randint(0, 60)] if old and rng.random() < 0.6 else []
                prompt = [*base, *(rng.randrange(10**6) for _ in range(rng.randint(2, 60)))]
                found = cache.match(KeyBatch.pack([prompt[:-1]]))
                row = int(cache.admit(found)[0])
                tokens[row], computed[row] = prompt, int(found.reuse_len[0])
            budget, ends = chunk, {}
            for row, key in tokens.items():
                some = min(budget, len(key) - computed[row])
                if some > 0:
                    ends[row] = computed[row] + some
                    budget -= some
            if not ends:
                continue
            rows = list(ends)
            cache.extend(rows, list(ends.values()))
            cache.advance(rows)
            computed.update(ends)
            whole = [row for row in rows if computed[row] == len(tokens[row])]
            if rng.random() < 0.8:
                cache.commit(rows, KeyBatch.pack([tokens[row] for row in rows]))
            cache.slide(rows)
            for row in whole:
                if rng.random() < 0.05 or len(tokens[row]) > 200:
                    cache.finish([row], KeyBatch.pack([tokens[row]]))
                    old.append(tokens.pop(row))
                else:
                    tokens[row].append(rng.randrange(10**6))


class TestPage:
    def test_the_table_of_the_documentation_is_what_the_command_says(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text()
        for name in ("gpt-oss-20b", "gpt-oss-120b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b"):
            cells = [name]
            for memory in (24, 40, 80):
                found = size_pools(load_model(name), memory * GIB, kv="fp8", running=32)
                cells.append(f"{found.full_tokens:,} / {found.swa_tokens:,}")
            assert f"| {' | '.join(cells)} |\n" in page


class TestCommands:
    def test_size_prints_both_pools_and_the_config(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        report = tmp_path / "out.json"
        argv = ["size", "--model", "gpt-oss-120b", "--memory", "40GiB", "--json", str(report)]
        assert main(argv) == 0
        config = (
            "CacheConfig(page_size=64, window=128, full_pages=16862, swa_pages=1340, max_rows=64, "
            'max_len=131072, device="cuda")'
        )
        # 64 rows of 7 pages and 128 of the chunk: 576 pages of both pools, 2,359,296 bytes each; 17,050 more
        # fit, split 128 to 6
        assert capsys.readouterr().out == (
            "gpt-oss-120b: window 128, bf16, 36,864 bytes a token full, 36,864 sliding\n"
            "40.00 GiB, page 64, 64 running\n"
            "pool   pages     tokens           bytes    GiB\n"
            "Full  16,862  1,079,168  39,784,808,448  37.05\n"
            "SWA    1,340     85,760   3,163,815,936   2.95\n"
            "The SWA pool holds 173 running requests at their most.\n"
            f"\n{config}\n"
        )
        counts = json.loads(report.read_text())
        assert counts["config"] == config
        assert counts["model"]["name"] == "gpt-oss-120b"
        assert (counts["full_pages"], counts["swa_pages"], counts["running_fit"]) == (
            16862,
            1340,
            173,
        )

    def test_size_of_a_share_on_several_gpus(self, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["size", "--model", "gemma-3-27b", "--memory", "24GB", "--kv", "fp8", "--tp", "4"]
        assert main([*argv, "--swa-share", "0.5", "--running", "8", "--page-size", "16"]) == 0
        out = capsys.readouterr().out
        # 12e9 bytes / (16 * 53,248), page 0 off
        assert "on each of 4 GPUs\n" in out
        assert "swa_pages=14084," in out
        assert main([*argv, "--swa-share", "auto"]) == 0

    def test_models_lists_the_catalogue(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        report = tmp_path / "out.json"
        assert main(["models", "--kv", "fp8", "--json", str(report)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 12
        assert lines[6].split() == ["gemma-3-27b", "10", "52", "1,024", "40,960", "212,992"]
        models = json.loads(report.read_text())["models"]
        assert list(models) == list(catalogue())
        assert models["gemma-3-27b"]["swa_token_bytes"] == 212_992

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--model", "x"], "model must be one of "),
            (["--memory", "lots"], "memory must be like 40GiB, 40GB or a number, got 'lots'"),
            (["--memory", "1KiB"], "memory must be at least "),
            (["--kv", "int4"], "kv must be one of fp8, bf16, fp16, got 'int4'"),
            (["--page-size", "0"], "page_size must be in [1, 1048576], got 0"),
            (["--running", "0"], "running must be in [1, 1048576], got 0"),
            (["--max-len", "0"], "max_len must be in [1, "),
            (["--tp", "0"], "tp must be in [1, 1048576], got 0"),
            (["--swa-share", "1"], "swa_share must be in (0, 1), got 1.0"),
            (
                ["--json", "/nowhere/at/all.json"],
                "--json: /nowhere/at/all.json: there is no folder",
            ),
        ],
    )
    def test_bad_input_is_one_line(
        self, capsys: pytest.CaptureFixture[str], options: list[str], message: str
    ) -> None:
        argv = ["size", "--model", "gpt-oss-20b", "--memory", "40GiB", *options]
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"kvcache size: error: {message}")
        assert err.count("\n") == 1

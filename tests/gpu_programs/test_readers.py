"""The readers of compiled programs, on short texts in XLA's form."""

from tests.gpu_programs.hlo import Array, closing, parse
from tests.gpu_programs.thunks import parse_thunks

MODULE = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {1}: (3, {}, may-alias) }, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%put (cache: bf16[8,16,4], new: bf16[8,1,4], at: s32[]) -> (bf16[8,16,4], bf16[8,16,4]) {
  %cache = bf16[8,16,4]{2,1,0} parameter(0)
  %new = bf16[8,1,4]{2,1,0} parameter(1)
  %at = s32[] parameter(2)
  %updated = bf16[8,16,4]{2,1,0} dynamic-update-slice(%cache, %new, %at, %at, %at)
  %doubled = bf16[8,16,4]{2,1,0} add(%cache, %cache)
  ROOT %both = (bf16[8,16,4]{2,1,0}, bf16[8,16,4]{2,1,0}) tuple(%updated, %doubled)
}

%body (state: (s32[], bf16[8,16,4])) -> (s32[], bf16[8,16,4]) {
  %state = (s32[], bf16[8,16,4]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %k = bf16[8,16,4]{2,1,0} get-tuple-element(%state), index=1
  %kernel = (bf16[8,4]{1,0}, bf16[8,16,4]{2,1,0}) custom-call(%i, /*index=1*/%k), custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{1}: (1, {})}, backend_config={name = "(odd) [text", x = "}"}
  %k2 = bf16[8,16,4]{2,1,0} get-tuple-element(%kernel), index=1
  %put.1 = (bf16[8,16,4]{2,1,0}, bf16[8,16,4]{2,1,0}) fusion(%k2, %k2, %i), kind=kLoop, calls=%put
  %copy.1 = bf16[8,16,4]{2,1,0:T(8,128)} copy(%k2), metadata={op_name="jit(f)/while/body/copy"}
  %reduce.start = ((bf16[2,8]{1,0}), bf16[2,8]{1,0}) all-reduce-start(%k2), replica_groups=[1,8]<=[8], to_apply=%add
  %reduce.done = bf16[2,8]{1,0} all-reduce-done(%reduce.start)
  ROOT %next = (s32[], bf16[8,16,4]{2,1,0}) tuple(%i, %copy.1)
}

%condition (state.1: (s32[], bf16[8,16,4])) -> pred[] {
  %state.1 = (s32[], bf16[8,16,4]{2,1,0}) parameter(0)
  ROOT %go = pred[] custom-call(%state.1), custom_call_target="xla_ffi_python_gpu_callback"
}

%scattered (x.1: f32[64,2]) -> (f32[8,2], bf16[3]) {
  %x.1 = f32[64,2]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = (f32[8,2]{1,0}, bf16[3]{0}) reduce-scatter(%x.1, %x.1), dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[64,2], init: (s32[], bf16[8,16,4])) -> f32[8,2] {
  %x = f32[64,2]{1,0} parameter(0)
  %init = (s32[], bf16[8,16,4]{2,1,0}) parameter(1)
  %while.1 = (s32[], bf16[8,16,4]{2,1,0}) while(%init), condition=%condition, body=%body
  %start = ((f32[64,2]{1,0}), (f32[8,2]{1,0}, bf16[3]{0})) async-start(%x), calls=%scattered
  ROOT %done = (f32[8,2]{1,0}, bf16[3]{0}) async-done(%start)
}
"""  # noqa: E501

THUNKS = """\
000: kCommandBuffer [source       | next=009 (1)]
    001: kCopy         [source       | sink        ] kCopy
    002: kCustomKernel [prev=001 (1) | sink        ] loop_add_fusion grid: [4, 1, 1]
009: kWhile         [prev=000 (1) | next=113 (1)]
condition:
    010: kCustomKernel [source       | sink        ] less grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=073 (1)]
        011: kCuDnn        [source       | sink        ] kCuDnn
    073: kWhile         [prev=000 (1) | sink        ]
condition:
        078: kCustomKernel [source       | sink        ] less_2 grid: [1, 1, 1]
      body:
        000: kCommandBuffer [source | sink]
            081: kCustomKernel [source       | sink        ] decode_attention grid: [8, 32, 2]
        082: kAsyncStart   [source       | sink        ] stream=communication_stream[0]
            083: kAllReduce [source | sink] kAllReduce
        084: kAsyncDone    [source       | sink        ] async_id=82
113: kCustomKernel  [prev=009 (1) | sink        ] transpose grid: [4, 1, 1]
"""


def test_a_module_is_its_computations_and_their_instructions():
    module = parse(MODULE)
    assert module.entry == "main"
    assert list(module.computations) == ["add", "put", "body", "condition", "scattered", "main"]
    assert [one.opcode for one in module.computations["body"].instructions.values()] == [
        "parameter", "get-tuple-element", "get-tuple-element", "custom-call", "get-tuple-element",
        "fusion", "copy", "all-reduce-start", "all-reduce-done", "tuple",
    ]  # fmt: skip
    kernel = module.computations["body"].instructions["kernel"]
    assert kernel.arrays == (Array("bf16", (8, 4)), Array("bf16", (8, 16, 4)))
    assert kernel.operands == ("i", "k")
    assert kernel.target == "__gpu$xla.gpu.triton"
    assert kernel.aliased == {1}
    assert module.num_aliased == 2


def test_bytes_follow_the_type():
    sizes = {"bf16": 2, "f32": 4, "pred": 1, "s32": 4, "u8": 1, "f8e4m3fn": 1, "s4": 1, "f64": 8}
    assert {dtype: Array(dtype, (3, 2)).num_bytes // 6 for dtype in sizes} == sizes
    assert Array("f32", ()).num_bytes == 4


def test_a_loops_body_and_what_it_fills():
    """What a kernel aliases and what a fusion updates in place is no new array."""
    module = parse(MODULE)
    (loop,) = module.loops()
    assert module.body(loop) == "body"
    written = [(str(array), one.name) for array, one in module.written("body")]
    cache = "bf16[8,16,4]"
    assert written == [
        ("bf16[8,4]", "kernel"),
        (cache, "put.1"),  # the second array of the fusion, which is computed
        (cache, "copy.1"),
        ("bf16[2,8]", "reduce.done"),
    ]


def test_collectives_count_once_and_by_their_results():
    module = parse(MODULE)
    assert [(one.kind, one.num_bytes) for one in module.collectives("body")] == [("all-reduce", 32)]
    everywhere = {one.kind: [str(a) for a in one.arrays] for one in module.collectives()}
    assert everywhere == {
        "all-reduce": ["bf16[2,8]"],
        "reduce-scatter": ["f32[8,2]", "bf16[3]"],
    }


def test_a_callback_is_a_host_transfer():
    module = parse(MODULE)
    assert [one.name for one in module.host_transfers()] == ["go"]
    assert module.host_transfers("body") == []


def test_brackets_in_quotes_do_not_count():
    text = '(a, "b)", {c}) d'
    assert text[: closing(text, 0) + 1] == '(a, "b)", {c})'


def test_launches_are_a_tree():
    root = parse_thunks(THUNKS)
    assert [one.kind for one in root.launches] == ["kCommandBuffer", "kWhile", "kCustomKernel"]
    outer = root.launches[1].part("body")
    assert [one.kind for one in outer.launches] == ["kCommandBuffer", "kWhile"]
    inner = outer.launches[1].part("body")
    assert [one.kind for one in inner.launches] == ["kCommandBuffer", "kAsyncStart"]
    assert [one.text for one in inner.launches[0].children] == ["decode_attention grid: [8, 32, 2]"]
    assert [one.text for one in outer.launches[1].part("condition").children] == [
        "less_2 grid: [1, 1, 1]"
    ]

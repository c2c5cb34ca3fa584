//! Every method of every backend against the scalar definition, bit by bit.

use std::io::Write;

use super::super::Isa;
use super::super::dispatch::Detected;
use super::{Kernel, LANES, Lanes};

type Floats = [f32; LANES];

/// The arithmetic methods; `Load` to `StorePart` are in [`Memory`].
#[derive(Debug, Clone, Copy, PartialEq)]
enum Op {
    Add,
    Sub,
    Mul,
    Div,
    Fma,
    Max,
    Min,
    SelectLt,
    Copysign,
    Round,
    Exp2Int,
    Mantissa,
    Exponent,
    Sum,
}

/// One method on three operands (and a fourth, the third reversed).
#[derive(Clone, Copy)]
struct Arithmetic {
    op: Op,
    a: Floats,
    b: Floats,
    c: Floats,
}

impl Kernel for Arithmetic {
    type Output = Floats;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> Floats {
        let mut reversed = self.c;
        reversed.reverse();
        // SAFETY: called through `Detected::run`; every pointer is to sixteen floats.
        unsafe {
            let (a, b, c) = (L::load(self.a.as_ptr()), L::load(self.b.as_ptr()), L::load(self.c.as_ptr()));
            let out = match self.op {
                Op::Add => a.add(b),
                Op::Sub => a.sub(b),
                Op::Mul => a.mul(b),
                Op::Div => a.div(b),
                Op::Fma => a.fma(b, c),
                Op::Max => a.max(b),
                Op::Min => a.min(b),
                Op::SelectLt => a.select_lt(b, c, L::load(reversed.as_ptr())),
                Op::Copysign => a.copysign(b),
                Op::Round => a.round(),
                Op::Exp2Int => a.exp2_int(),
                Op::Mantissa => a.split_exponent().0,
                Op::Exponent => a.split_exponent().1,
                Op::Sum => L::splat(a.sum()),
            };
            let mut result = [f32::NAN; LANES];
            out.store(result.as_mut_ptr());
            result
        }
    }
}

/// Every load of bytes at `p`, then the stores.
#[derive(Clone, Copy)]
struct Memory {
    p: *const u8,
    load: Load,
}

#[derive(Debug, Clone, Copy)]
enum Load {
    F32(usize),
    Bf16(usize),
    Mxfp4(u8),
}

impl Load {
    fn bytes(self) -> usize {
        match self {
            Load::F32(n) => 4 * n,
            Load::Bf16(n) => 2 * n,
            Load::Mxfp4(_) => LANES / 2,
        }
    }
}

impl Kernel for Memory {
    type Output = Floats;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> Floats {
        let mut result = [7.0; LANES];
        // SAFETY: called through `Detected::run`; `self.load.bytes()` are readable at `self.p`.
        unsafe {
            let lanes = match self.load {
                Load::F32(LANES) => L::load(self.p.cast()),
                Load::F32(n) => L::load_part(self.p.cast(), n),
                Load::Bf16(LANES) => L::load_bf16(self.p),
                Load::Bf16(n) => L::load_bf16_part(self.p, n),
                Load::Mxfp4(scale) => L::load_mxfp4(self.p, L::mxfp4_table(scale)),
            };
            lanes.store(result.as_mut_ptr());
        }
        result
    }
}

/// The first `n` lanes of `from` to `to`.
#[derive(Clone, Copy)]
struct StorePart {
    from: Floats,
    to: *mut f32,
    n: usize,
}

impl Kernel for StorePart {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: called through `Detected::run`; `n` floats are writable at `to`.
        unsafe { L::load(self.from.as_ptr()).store_part(self.to, self.n) }
    }
}

/// What this CPU has beyond scalar; says which sets go untested.
fn backends() -> Vec<Detected> {
    let found: Vec<_> = Detected::all().filter(|d| d.isa() != Isa::Scalar).collect();
    for isa in Isa::ALL {
        if isa != Isa::Scalar && found.iter().all(|d| d.isa() != isa) {
            // Not `eprintln!`: a passing test would swallow it.
            let _ = writeln!(std::io::stderr(), "skipped: {isa} is not available on this CPU");
        }
    }
    found
}

fn scalar() -> Detected {
    Detected::all().find(|d| d.isa() == Isa::Scalar).expect("scalar is always present")
}

/// Equal bits, or both NaN where the operation computes (moves must keep a NaN's payload too).
fn same(a: f32, b: f32, moves: bool) -> bool {
    a.to_bits() == b.to_bits() || (!moves && a.is_nan() && b.is_nan())
}

fn assert_same(isa: Detected, got: Floats, wanted: Floats, moves: bool, case: &dyn std::fmt::Debug) {
    for i in 0..LANES {
        assert!(
            same(got[i], wanted[i], moves),
            "{} lane {i}: got {:?} ({:08x}), wanted {:?} ({:08x}) in {case:?}",
            isa.isa(),
            got[i],
            got[i].to_bits(),
            wanted[i],
            wanted[i].to_bits(),
        );
    }
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// Any bits that are not a signalling NaN, which arithmetic may quieten and moves may not.
    fn any(&mut self) -> f32 {
        let value = f32::from_bits(self.next());
        if value.is_nan() { f32::from_bits(value.to_bits() | 0x0040_0000) } else { value }
    }

    fn floats(&mut self, f: impl Fn(&mut Self) -> f32) -> Floats {
        std::array::from_fn(|_| f(self))
    }
}

const SPECIAL: [u32; 26] = [
    0x0000_0000,
    0x8000_0000,
    0x3f80_0000,
    0xbf80_0000,
    0x3f00_0000, // 0.5
    0xbf00_0000,
    0x3fc0_0000, // 1.5
    0xbfc0_0000,
    0x4020_0000, // 2.5
    0xc020_0000,
    0x3eff_ffff, // just below 0.5
    0x0000_0001, // the smallest subnormal
    0x8000_0001,
    0x007f_ffff, // the largest subnormal
    0x0080_0000, // the smallest normal
    0x8080_0000,
    0x7f7f_ffff, // the largest
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0000,
    0xffc0_0000,
    0x7fc0_1234,
    0x3f80_0001,
    0x4b00_0001,
    0x3f7f_ffff,
];

#[test]
fn arithmetic_gives_the_scalar_bits_on_any_operands() {
    use Op::*;
    let mut random = Random(1);
    let special = |random: &mut Random| f32::from_bits(SPECIAL[random.next() as usize % SPECIAL.len()]);
    for isa in backends() {
        for op in [Add, Sub, Mul, Div, Fma, Max, Min, SelectLt, Copysign, Sum] {
            for round in 0..2000 {
                let mut draw = || match round % 4 {
                    0 => random.floats(Random::any),
                    1 => random.floats(|r| (r.next() as i32) as f32 / 2f32.powi(30)),
                    2 => random.floats(special),
                    _ => random.floats(|r| if r.next() & 1 == 0 { special(r) } else { r.any() }),
                };
                let case = Arithmetic { op, a: draw(), b: draw(), c: draw() };
                let moves = matches!(op, Max | Min | SelectLt | Copysign);
                assert_same(isa, isa.run(case), scalar().run(case), moves, &(op, case.a, case.b, case.c));
            }
        }
    }
}

#[test]
fn every_pair_of_special_values_compares_alike() {
    for isa in backends() {
        for op in [Op::Max, Op::Min, Op::SelectLt, Op::Copysign, Op::Add, Op::Mul, Op::Div] {
            for a in SPECIAL.map(f32::from_bits) {
                for b in SPECIAL.map(f32::from_bits) {
                    let case = Arithmetic { op, a: [a; LANES], b: [b; LANES], c: [a; LANES] };
                    let moves = !matches!(op, Op::Add | Op::Mul | Op::Div);
                    assert_same(isa, isa.run(case), scalar().run(case), moves, &(op, a, b));
                }
            }
        }
    }
}

#[test]
fn round_goes_to_even_and_keeps_the_sign_of_zero() {
    let a: Floats =
        [0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 0.499_999_97, -0.2, 0.0, -0.0, 7.5, 8.5, 1e-40, -1e-40, 4194303.5, -3.7];
    let wanted: Floats = [0.0, -0.0, 2.0, -2.0, 2.0, -2.0, 0.0, -0.0, 0.0, -0.0, 8.0, 8.0, 0.0, -0.0, 4194304.0, -4.0];
    for isa in Detected::all() {
        assert_same(isa, isa.run(Arithmetic { op: Op::Round, a, b: a, c: a }), wanted, true, &a);
    }
}

#[test]
fn powers_of_two_and_exponents_are_exact_over_their_whole_range() {
    for isa in Detected::all() {
        for e in -126..=127 {
            let power = f32::from_bits(((e + 127) as u32) << 23);
            let run = |op, a| isa.run(Arithmetic { op, a: [a; LANES], b: [0.0; LANES], c: [0.0; LANES] });
            assert_same(isa, run(Op::Exp2Int, e as f32), [power; LANES], true, &e);
            for mantissa in [1.0, 1.25, 1.999_999_9] {
                assert_same(isa, run(Op::Mantissa, power * mantissa), [mantissa; LANES], true, &e);
                assert_same(isa, run(Op::Exponent, power * mantissa), [e as f32; LANES], true, &e);
            }
        }
    }
}

#[test]
fn the_sum_is_the_documented_tree() {
    let mut a = [0.0; LANES];
    a[0] = 1e8;
    a[8] = -1e8; // cancels first: what lanes 1.. hold survives only in this order
    a[4] = 1.0;
    a[1] = 0.25;
    for isa in Detected::all() {
        let got = isa.run(Arithmetic { op: Op::Sum, a, b: a, c: a });
        assert_same(isa, got, [1.25; LANES], true, &a);
    }
}

#[test]
fn subnormals_are_kept() {
    let tiny = f32::from_bits(3);
    for isa in Detected::all() {
        let run = |op, a, b| isa.run(Arithmetic { op, a: [a; LANES], b: [b; LANES], c: [0.0; LANES] })[5].to_bits();
        assert_eq!(run(Op::Add, tiny, tiny), 6);
        assert_eq!(run(Op::Fma, tiny, 2.0), 6);
        assert_eq!(run(Op::Mul, f32::MIN_POSITIVE, 0.5), 0x0040_0000);
    }
}

#[test]
fn all_codes_at_all_scales_are_exact() {
    let values = [0.0f64, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let packed: [u8; 8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe];
    for isa in Detected::all() {
        for scale in 0..=255u8 {
            let got = isa.run(Memory { p: packed.as_ptr(), load: Load::Mxfp4(scale) });
            for (code, got) in got.into_iter().enumerate() {
                if scale == 255 {
                    assert!(got.is_nan(), "{}: code {code} at the NaN scale gave {got}", isa.isa());
                    continue;
                }
                let sign = if code < 8 { 1.0 } else { -1.0 };
                let wanted = (sign * values[code % 8] * 2f64.powi(i32::from(scale) - 127)) as f32;
                assert_eq!(got.to_bits(), wanted.to_bits(), "{}: code {code} scale {scale}", isa.isa());
            }
        }
    }
}

#[test]
fn loads_give_the_scalar_bits_at_every_alignment() {
    let mut random = Random(2);
    let bytes: Vec<u8> = (0..100).map(|_| random.next() as u8).collect();
    for isa in backends() {
        for offset in 0..17 {
            let p = bytes[offset..].as_ptr();
            let parts = (0..=LANES).flat_map(|n| [Load::F32(n), Load::Bf16(n)]);
            for load in parts.chain([0, 1, 120, 127, 254, 255].map(Load::Mxfp4)) {
                let case = Memory { p, load };
                let moves = !matches!(load, Load::Mxfp4(255));
                assert_same(isa, isa.run(case), scalar().run(case), moves, &(load, offset));
            }
        }
    }
}

#[test]
fn a_part_is_stored_and_nothing_beyond_it() {
    let from: Floats = std::array::from_fn(|i| i as f32 + 1.0);
    for isa in Detected::all() {
        for n in 0..LANES {
            let mut to = [-1.0f32; LANES];
            isa.run(StorePart { from, to: to.as_mut_ptr(), n });
            let wanted = std::array::from_fn(|i| if i < n { from[i] } else { -1.0 });
            assert_same(isa, to, wanted, true, &n);
        }
    }
}

/// Pages whose successor cannot be touched: reading or writing a byte too many kills the test.
#[cfg(unix)]
struct Guarded {
    base: *mut u8,
    page: usize,
}

#[cfg(unix)]
impl Guarded {
    fn new() -> Self {
        // SAFETY: a fresh anonymous mapping of two pages, of which the second is then made inaccessible.
        unsafe {
            let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
            let base = libc::mmap(std::ptr::null_mut(), 2 * page, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            let base = base.cast::<u8>();
            assert_eq!(libc::mprotect(base.add(page).cast(), page, libc::PROT_NONE), 0);
            Self { base, page }
        }
    }

    /// The last `n` bytes before the border.
    fn last(&self, n: usize) -> *mut u8 {
        self.base.wrapping_add(self.page - n)
    }
}

#[cfg(unix)]
impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, which nothing points into any more.
        unsafe { libc::munmap(self.base.cast(), 2 * self.page) };
    }
}

#[cfg(unix)]
#[test]
fn loads_and_stores_touch_no_byte_beyond_their_lanes() {
    let guarded = Guarded::new();
    for isa in Detected::all() {
        for n in 0..=LANES {
            for load in [Load::F32(n), Load::Bf16(n), Load::Mxfp4(127)] {
                isa.run(Memory { p: guarded.last(load.bytes()), load });
            }
            if n < LANES {
                isa.run(StorePart { from: [1.0; LANES], to: guarded.last(4 * n).cast(), n });
            }
        }
    }
}

#[test]
fn names_are_parsed_as_they_are_printed() {
    for isa in Isa::ALL {
        assert_eq!(isa.to_string().parse::<Isa>().expect("its own name"), isa);
    }
    let error = "sse".parse::<Isa>().expect_err("no such set");
    assert!(error.to_string().contains("avx512, avx2, neon, scalar"), "{error}");
    assert!("AVX2".parse::<Isa>().is_err() && "".parse::<Isa>().is_err());
}

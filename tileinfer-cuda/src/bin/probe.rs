//! x
use cutile::compile_api::KernelCompiler;
use cutile::tile_kernel::CompileOptions;
use cutile_compiler::specialization::DivHint;
use tileinfer_cuda::kernels::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let g: Vec<String> = a[3].split(',').map(|s| s.to_string()).collect();
    let ast: fn() -> cutile_compiler::ast::Module = match a[1].as_str() { "linear" => linear::linear::__module_ast_self, "attention" => attention::attention::__module_ast_self, "norm" => norm::norm::__module_ast_self, "activation" => activation::activation::__module_ast_self, "rows" => rows::rows::__module_ast_self, "rope" => rope::rope::__module_ast_self, "sample" => sample::sample::__module_ast_self, _ => panic!() };
    let h = ["w","x","k","y","n","partials","k_split","queries","keys","values","out","outputs","maxima","weights","tables","head_dim"].map(|n| (n, DivHint::from_value(16)));
    let warps = std::env::var("W").map_or(4, |w| w.parse().unwrap());
    let occ = std::env::var("O").map_or(2, |w| w.parse().unwrap());
    let r = KernelCompiler::new(ast, &a[1], &a[2])
        .generics(g)
        .scalar_hints(&h)
        .options(CompileOptions::default().num_worker_warps_per_cta(warps).occupancy(occ))
        .target("sm_90").compile().unwrap_or_else(|e| { eprintln!("{e}"); std::process::exit(1) });
    if std::env::var("IR").is_ok() { println!("{}", r.ir_text()); }
    println!("checks {:?} {:?}", r.check_counts(), r.launch_checks());
    std::fs::write("/tmp/k.bc", r.bytecode().unwrap()).unwrap();
}

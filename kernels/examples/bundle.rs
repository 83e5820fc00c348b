//! Makes a bundle by hand: `bundle sandbox|lab AGENT OUT [DEB]`.
use parbake_kernels::bundle::{BundleSpec, make_with};
use parbake_kernels::{KernelSource, fetch, modules};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kind, agent, out, deb @ ..] = arguments.as_slice() else {
        return Err("usage: bundle sandbox|lab AGENT OUT [DEB]".into());
    };
    let source =
        deb.first().map_or_else(KernelSource::default, |deb| KernelSource::Deb(deb.into()));
    let work = tempfile::tempdir()?;
    let kernel = fetch(&source, work.path(), &mut |event| eprintln!("{event:?}"))?;
    let spec = match kind.as_str() {
        "lab" => BundleSpec { drivers: modules::LAB, ..BundleSpec::sandbox() },
        _ => BundleSpec::sandbox(),
    };
    std::fs::create_dir_all(out)?;
    println!("{:#?}", make_with(&kernel, agent.as_ref(), &spec, out.as_ref())?);
    Ok(())
}

//! What is fuzzed: one module per kind of foreign bytes, each with a `run` that panics where a
//! promise is broken. `cargo fuzz` drives them (see `fuzz/README.md`); the test replays the seeds and
//! their mutations with an ordinary compiler.
#![forbid(unsafe_code)]

mod machine;

/// Declares the modules, and lists them.
macro_rules! targets {
    ($($name:ident $most:literal)*) => {
        $(pub mod $name;)*

        /// All targets: name, longest useful input in bytes, what runs one.
        pub const TARGETS: &[(&str, usize, fn(&[u8]))] =
            &[$((stringify!($name), $most, $name::run)),*];
    };
}

targets! {
    artifact 8192
    block 2048
    challenge 1024
    credentials 4096
    dns 1024
    dockerfile 4096
    ext4 131072
    frames 4096
    index 4096
    kernel 16384
    keyless 32768
    layer 16384
    manifest 8192
    mmio 2048
    name 512
    net 2048
    pack 8192
    recipe 4096
    registries 4096
    state 65536
    tar 16384
    tree 4096
    vsock 2048
}

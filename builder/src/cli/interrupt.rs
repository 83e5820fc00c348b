//! Ctrl-C and its kin, for work that ends in an orderly way.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

static ASKED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From now on SIGINT, SIGTERM and SIGHUP set a flag instead of ending the process; the second one
/// ends it at once, with 130. What that leaves is swept by the next command.
pub fn watch() -> Arc<AtomicBool> {
    let flag = ASKED.get_or_init(|| {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // In this order: the first signal finds the flag unset, passes, and sets it.
            let _ =
                signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&flag));
            let _ = signal_hook::flag::register(signal, Arc::clone(&flag));
        }
        flag
    });
    Arc::clone(flag)
}

/// Ends the process, with 130, when it has not ended by itself so long after such a signal. For work
/// that may be cut short at any instant.
pub fn end_within(patience: Duration) {
    static WATCHDOG: std::sync::Once = std::sync::Once::new();
    WATCHDOG.call_once(|| {
        std::thread::spawn(move || {
            while !asked() {
                std::thread::sleep(Duration::from_millis(200));
            }
            std::thread::sleep(patience);
            eprintln!("error: interrupted\nhint: {}", super::remote::KEPT);
            std::process::exit(130);
        });
    });
}

/// Whether such a signal came.
pub fn asked() -> bool {
    ASKED.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

use super::*;
use parbake_cache::Digest;

fn write(audit: &Audit, kind: &str) {
    let detail = json!({ "argv": ["sh", "-c", "echo \"}\",\"hash\":\""], "kind": kind });
    let entry = Entry { kind, actor: "uid:0", sandbox: Some("abc"), unix_ms: 1, detail: &detail };
    audit.write(&entry).unwrap();
}

fn log_with(
    lines: usize,
    change: impl FnOnce(&Path, &mut AuditConfig),
) -> (tempfile::TempDir, AuditConfig) {
    let directory = tempfile::tempdir().unwrap();
    let mut config = AuditConfig::new(&directory.path().join("audit.jsonl"));
    change(directory.path(), &mut config);
    let audit = Audit::open(config.clone()).unwrap();
    (0..lines).for_each(|n| write(&audit, &format!("kind{n}")));
    (directory, config)
}

fn log(lines: usize) -> (tempfile::TempDir, AuditConfig) {
    log_with(lines, |_, _| {})
}

fn key(directory: &Path, bytes: &[u8]) -> Result<Key, AuditError> {
    let path = directory.join("key");
    std::fs::write(&path, bytes).unwrap();
    Key::read(&path)
}

fn sealed(directory: &Path, config: &mut AuditConfig) {
    config.key = Some(key(directory, &[7; 32]).unwrap());
    config.anchor = Some(directory.join("anchor"));
}

#[test]
fn a_log_is_continued_and_verifies() {
    let (_directory, config) = log(3);
    let first = verify(&config).unwrap();
    assert_eq!((first.first, first.lines, first.torn_bytes), (1, 3, 0));
    let audit = Audit::open(config.clone()).unwrap();
    assert_eq!(audit.head(), (3, first.head.clone()));
    write(&audit, "more");
    let second = verify(&config).unwrap();
    assert_eq!(second.lines, 4);
    assert_ne!(second.head, first.head);
    assert!(matches!(Audit::open(config), Err(AuditError::InUse(_))));
}

#[test]
fn every_change_shows_where_it_is() {
    let (_directory, config) = log(5);
    let text = std::fs::read_to_string(&config.path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let put = |lines: &[&str]| std::fs::write(&config.path, lines.join("\n") + "\n").unwrap();
    let broken = |lines: &[&str]| {
        put(lines);
        match verify(&config) {
            Err(AuditError::Broken { line, .. }) => line,
            other => panic!("{other:?}"),
        }
    };
    // Removed, doubled, swapped, changed in place.
    assert_eq!(broken(&[lines[0], lines[2], lines[3], lines[4]]), 2);
    assert_eq!(broken(&[lines[0], lines[1], lines[1], lines[2]]), 3);
    assert_eq!(broken(&[lines[0], lines[2], lines[1], lines[3]]), 2);
    // Cut off the front: it says so.
    put(&lines[1..]);
    assert_eq!(verify(&config).unwrap().first, 2);
    for (at, _) in lines[3].char_indices() {
        let mut changed = lines[3].to_owned().into_bytes();
        changed[at] ^= 1;
        let changed = String::from_utf8(changed).unwrap();
        if changed.contains('\n') {
            continue;
        }
        assert_eq!(broken(&[lines[0], lines[1], lines[2], &changed, lines[4]]), 4, "{at}");
    }
    // A changed line with a hash that fits it again breaks the next one.
    assert_eq!(broken(&[lines[0], &forge(lines[1]), lines[2]]), 3);
}

/// Another line, with the hash that everybody can make.
fn forge(line: &str) -> String {
    let forged = line.replace("uid:0", "uid:1");
    let open = forged.rsplit_once(BEFORE_HASH).unwrap().0.to_owned();
    let hash = Digest::of(format!("{open}}}").as_bytes()).hex();
    format!("{open}{BEFORE_HASH}{hash}{AFTER_HASH}")
}

#[test]
fn without_the_key_not_even_the_last_line_can_be_made_anew() {
    let (directory, config) = log_with(3, sealed);
    assert_eq!(verify(&config).unwrap().lines, 3);
    let text = std::fs::read_to_string(&config.path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let bare = AuditConfig::new(&config.path);
    assert!(matches!(verify(&bare), Err(AuditError::Broken { line: 1, .. })));
    // Without a key, a forged last line goes unnoticed; with one it does not.
    let forged = [lines[0], lines[1], &forge(lines[2])].join("\n") + "\n";
    std::fs::write(&config.path, forged).unwrap();
    assert!(matches!(verify(&config), Err(AuditError::Broken { line: 3, .. })));
    assert!(key(directory.path(), &[7; 31]).is_err());
    assert_eq!(format!("{:?}", key(directory.path(), &[7; 32]).unwrap()), "Key");
}

#[test]
fn lines_that_were_cut_off_are_missed() {
    let (directory, config) = log_with(5, sealed);
    let text = std::fs::read_to_string(&config.path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let anchor = std::fs::read(config.anchor.as_ref().unwrap()).unwrap();
    let refused = || match (verify(&config), Audit::open(config.clone())) {
        (Err(AuditError::Anchor { why, .. }), Err(AuditError::Anchor { .. })) => why,
        other => panic!("{other:?}"),
    };
    std::fs::write(&config.path, lines[..3].join("\n") + "\n").unwrap();
    assert!(refused().contains("cut off"));
    std::fs::write(&config.path, "").unwrap();
    assert!(refused().contains("cut off"));
    // An anchor that fits the shorter log needs the key.
    std::fs::write(&config.path, lines[..3].join("\n") + "\n").unwrap();
    let shorter = directory.path().join("shorter");
    let hash = lines[2].rsplit_once(BEFORE_HASH).unwrap().1.trim_end_matches(AFTER_HASH);
    Anchor::open(&shorter).unwrap().set(None, 3, hash).unwrap();
    std::fs::copy(&shorter, config.anchor.as_ref().unwrap()).unwrap();
    assert!(refused().contains("another key"));
    // Without one it is not verified; the next start says so, and goes on.
    std::fs::remove_file(config.anchor.as_ref().unwrap()).unwrap();
    assert!(matches!(verify(&config), Err(AuditError::Anchor { .. })));
    drop(Audit::open(config.clone()).unwrap());
    assert!(std::fs::read_to_string(&config.path).unwrap().contains("auditAnchorMissing"));
    assert_eq!(verify(&config).unwrap().lines, 4);
    // After a crash, the log may be ahead.
    std::fs::write(&config.path, &text).unwrap();
    std::fs::write(config.anchor.as_ref().unwrap(), &anchor).unwrap();
    write(&Audit::open(AuditConfig { anchor: None, ..config.clone() }).unwrap(), "ahead");
    assert_eq!(verify(&config).unwrap().lines, 6);
}

#[test]
fn the_chain_goes_on_over_files() {
    let (directory, config) = log_with(20, |directory, config| {
        sealed(directory, config);
        config.file_bytes = 1500;
    });
    let found = verify(&config).unwrap();
    assert_eq!((found.first, found.lines), (1, 20));
    assert!(found.files > 3, "{found:?}");
    let part = |number| chain::finished_name(&config.path, number);
    assert!(part(1).metadata().unwrap().len() <= 1500);
    // It is continued where it was, also after a crash between two files.
    std::fs::rename(&config.path, part(u32::try_from(found.files).unwrap())).unwrap();
    assert_eq!(verify(&config).unwrap(), found);
    let audit = Audit::open(config.clone()).unwrap();
    assert_eq!(audit.head(), (20, found.head));
    write(&audit, "more");
    drop(audit);
    assert_eq!(verify(&config).unwrap().lines, 21);
    // One taken out of the middle is missed, the oldest put away is told.
    let away = directory.path().join("away");
    std::fs::rename(part(2), &away).unwrap();
    assert!(matches!(verify(&config), Err(AuditError::Broken { .. })));
    std::fs::rename(&away, part(2)).unwrap();
    std::fs::rename(part(1), &away).unwrap();
    let rest = verify(&config).unwrap();
    assert!(rest.first > 1 && rest.lines == 21, "{rest:?}");
    // A finished file that ends too early.
    let text = std::fs::read(part(2)).unwrap();
    std::fs::write(part(2), &text[..text.len() - 3]).unwrap();
    assert!(matches!(verify(&config), Err(AuditError::Broken { .. })));
}

#[test]
fn a_torn_line_is_taken_out_and_told() {
    let (_directory, config) = log(2);
    let whole = std::fs::read(&config.path).unwrap();
    std::fs::write(&config.path, [&whole[..], b"{\"line\":3,\"unix"].concat()).unwrap();
    assert_eq!(verify(&config).unwrap().torn_bytes, 15);
    let audit = Audit::open(config.clone()).unwrap();
    assert_eq!(audit.head().0, 3);
    let found = verify(&config).unwrap();
    assert_eq!((found.lines, found.torn_bytes), (3, 0));
    assert!(std::fs::read_to_string(&config.path).unwrap().contains("auditLineTorn"));
}

#[test]
fn a_broken_log_is_not_continued() {
    let (_directory, config) = log(2);
    let text = std::fs::read_to_string(&config.path).unwrap().replace("uid:0", "uid:1");
    std::fs::write(&config.path, text).unwrap();
    assert!(matches!(Audit::open(config), Err(AuditError::Broken { line: 1, .. })));
}

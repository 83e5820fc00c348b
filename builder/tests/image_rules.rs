//! The rules of flattening, one case each: layers, and the tree they give. Each case is flattened
//! on one thread and on several, and the finished image is judged by e2fsck and a loop mount.

mod judge;
mod layers;

use layers::{Entry, Flat, Layout, Tar, flatten_with, show};
use parbake_builder::ext4;
use parbake_builder::flatten::FlattenOptions;

fn finish(flat: &Flat) -> tempfile::NamedTempFile {
    let image = tempfile::NamedTempFile::new().expect("temporary file");
    let mut from = flat.file.try_clone().expect("file");
    std::io::Seek::rewind(&mut from).expect("file");
    std::io::copy(&mut from, &mut image.as_file()).expect("copy");
    let options = ext4::Options::new([7; 16]);
    ext4::finish(image.as_file(), &flat.flattened.area, flat.tree(), &options).expect("finish");
    image
}

/// Asserts what layers flatten to; `expected` is one name per line, indentation ignored.
#[track_caller]
fn rule(layers: impl IntoIterator<Item = Tar>, expected: &str) {
    let layout = Layout::of(layers.into_iter().map(Tar::finish));
    let image = layout.open().expect("image");
    let one = FlattenOptions { threads: 1, ..FlattenOptions::default() };
    let two = FlattenOptions { threads: 2, ..FlattenOptions::default() };
    let flat = flatten_with(&image, &one).expect("flatten");
    let expected: String = expected
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .fold(String::new(), |text, line| text + line + "\n");
    assert_eq!(flat.text(), expected);
    let other = flatten_with(&image, &two).expect("flatten");
    assert_eq!(other.text(), expected, "on two threads");
    let built = finish(&flat);
    judge::fsck(built.path());
    judge::mounted::compare(flat.tree(), built.path());
}

/// Asserts that layers are refused, with all of `words` in the message.
#[track_caller]
fn refused(layers: impl IntoIterator<Item = Tar>, words: &[&str]) {
    let error = show(layers.into_iter().map(Tar::finish)).expect_err("refused");
    for word in words {
        assert!(error.contains(word), "{word:?} is not in {error:?}");
    }
}

fn base() -> Tar {
    Tar::new()
        .directory("d")
        .file("d/old", "1")
        .directory("d/sub")
        .file("d/sub/deep", "2")
        .file("top", "3")
}

#[test]
fn whiteouts_hide_what_is_lower() {
    rule([base(), Tar::new().mark("d/.wh.old")], "d/\n d/sub/\n d/sub/deep=2\n top=3");
    rule([base(), Tar::new().mark(".wh.d")], "top=3");
    rule([base(), Tar::new().mark("d/sub/.wh.deep").mark(".wh.top")], "d/\n d/old=1\n d/sub/");
    // With something in it, of another type, or of a directory's form: it is a marker all the same.
    let odd = Tar::new().file("d/.wh.old", "text").directory(".wh.top").symlink("d/.wh.sub", "x");
    rule([base(), odd], "d/");
}

#[test]
fn whiteouts_of_nothing_do_nothing() {
    let nothing = Tar::new()
        .mark(".wh.none")
        .mark("none/.wh.none")
        .mark("top/.wh.none")
        .mark("none/.wh..wh..opq")
        .mark("top/.wh..wh..opq");
    rule([base(), nothing], "d/\n d/old=1\n d/sub/\n d/sub/deep=2\n top=3");
}

#[test]
fn whiteouts_spare_their_own_layer_in_any_order() {
    let after = "d/\n d/old=new\n d/sub/\n d/sub/deep=2\n top=3";
    rule([base(), Tar::new().mark("d/.wh.old").file("d/old", "new")], after);
    rule([base(), Tar::new().file("d/old", "new").mark("d/.wh.old")], after);
    // A directory given again below a whiteout of it holds only what is new.
    let after = "d/ 700\n d/new=4\n top=3";
    let parts = [
        Tar::new().entry(Entry::new(b'5', "d").mode(0o700)).unfinished(),
        Tar::new().file("d/new", "4").unfinished(),
        Tar::new().mark(".wh.d").unfinished(),
    ];
    for order in [[0, 1, 2], [2, 0, 1], [0, 2, 1]] {
        let layer = order.iter().fold(Tar::new(), |tar, &part| tar.raw(&parts[part]));
        rule([base(), layer], after);
    }
    // The same without an entry for the directory: it is a new, implied one either way.
    let after = "d/ @0\n d/sub/ @0\n d/sub/new=4\n top=3";
    rule([base(), Tar::new().mark(".wh.d").file("d/sub/new", "4")], after);
    rule([base(), Tar::new().file("d/sub/new", "4").mark(".wh.d")], after);
}

#[test]
fn opaque_directories_in_any_order() {
    let after = "d/ 700\n d/new=4\n d/sub/ @0\n d/sub/more=5\n top=3";
    let parts = [
        Tar::new().entry(Entry::new(b'5', "d").mode(0o700)).unfinished(),
        Tar::new().file("d/new", "4").unfinished(),
        Tar::new().file("d/sub/more", "5").unfinished(),
        Tar::new().mark("d/.wh..wh..opq").unfinished(),
    ];
    for order in
        [[0, 1, 2, 3], [0, 3, 1, 2], [3, 0, 1, 2], [2, 3, 1, 0], [1, 2, 3, 0], [1, 0, 3, 2]]
    {
        let layer = order.iter().fold(Tar::new(), |tar, &part| tar.raw(&parts[part]));
        rule([base(), layer], after);
    }
    // Without an entry of its own the directory keeps its attributes.
    rule([base(), Tar::new().mark("d/.wh..wh..opq")], "d/\n top=3");
    // Twice, nested, and at the root.
    let twice = Tar::new().mark("d/sub/.wh..wh..opq").mark("d/.wh..wh..opq").mark("d/.wh..wh..opq");
    rule([base(), twice], "d/\n top=3");
    rule([base(), Tar::new().file("new", "4").mark(".wh..wh..opq")], "new=4");
    // Only lower layers are hidden, also when the directory was new in the layer.
    let own = Tar::new().directory("n").file("n/f", "1").mark("n/.wh..wh..opq");
    rule(
        [base(), own, Tar::new().file("n/g", "2")],
        "d/\n d/old=1\n d/sub/\n d/sub/deep=2\n n/\n n/f=1\n n/g=2\n top=3",
    );
}

#[test]
fn whiteouts_count_from_layer_to_layer() {
    rule(
        [base(), Tar::new().mark(".wh.d"), Tar::new().directory("d").file("d/b", "4")],
        "d/\n d/b=4\n top=3",
    );
    rule(
        [base(), Tar::new().mark("d/.wh..wh..opq"), Tar::new().file("d/b", "4")],
        "d/\n d/b=4\n top=3",
    );
    rule(
        [base(), Tar::new().mark(".wh.top"), Tar::new().file("top", "5")],
        "d/\n d/old=1\n d/sub/\n d/sub/deep=2\n top=5",
    );
}

#[test]
fn whiteouts_follow_links_in_their_parents() {
    let lower = Tar::new()
        .directory("usr")
        .directory("usr/lib")
        .file("usr/lib/a", "1")
        .symlink("lib", "usr/lib");
    rule([lower.clone(), Tar::new().mark("lib/.wh.a")], "lib->usr/lib\n usr/\n usr/lib/");
    rule([lower.clone(), Tar::new().mark("lib/.wh..wh..opq")], "lib->usr/lib\n usr/\n usr/lib/");
    // The last component is the link itself.
    rule([lower, Tar::new().mark(".wh.lib")], "usr/\n usr/lib/\n usr/lib/a=1");
}

#[test]
fn malformed_markers_are_refused() {
    for bad in [".wh.", "d/.wh.", ".wh..", ".wh..."] {
        refused([base(), Tar::new().mark(bad)], &["layer 2", bad, "whiteout"]);
    }
    refused([Tar::new().file(".wh.d/inside", "1")], &["layer 1", ".wh.d/inside", "markers"]);
}

#[test]
fn aufs_leftovers_are_invisible_and_their_links_work() {
    let layer = Tar::new()
        .directory(".wh..wh.aufs")
        .directory(".wh..wh.orph")
        .file(".wh..wh.orph/1", "x")
        .directory(".wh..wh.plnk")
        .file(".wh..wh.plnk/12.34", "linked")
        .hardlink("a", ".wh..wh.plnk/12.34")
        .hardlink("b", ".wh..wh.plnk/12.34")
        .file("c", "3");
    rule([layer], "a=linked #0\n b=linked #0\n c=3");
}

#[test]
fn overlay_whiteouts_are_plain_things() {
    let layer = Tar::new()
        .entry(Entry::new(b'3', "top").device(0, 0))
        .entry(Entry::new(b'5', "d").pax("SCHILY.xattr.trusted.overlay.opaque", "y"));
    rule(
        [base(), layer],
        "d/ trusted.overlay.opaque=y\n d/old=1\n d/sub/\n d/sub/deep=2\n top c0:0",
    );
}

#[test]
fn hard_links_share_across_layers() {
    rule([Tar::new().file("a", "A"), Tar::new().hardlink("b", "a")], "a=A #0\n b=A #0");
    let three = Tar::new().file("t2", "old").hardlink("t1", "t2").hardlink("t3", "t2");
    rule([three.clone(), Tar::new().file("t1", "new")], "t1=new\n t2=old #0\n t3=old #0");
    rule([three.clone(), Tar::new().file("t2", "new")], "t1=old #0\n t2=new\n t3=old #0");
    rule([three.clone(), Tar::new().mark(".wh.t2")], "t1=old #0\n t3=old #0");
    rule([three.clone(), Tar::new().mark(".wh.t2").mark(".wh.t1")], "t3=old");
    // The link is to what its target is then, not to what it becomes.
    let layer = Tar::new().hardlink("b", "t2").file("t2", "new");
    rule([three, layer], "b=old #0\n t1=old #0\n t2=new\n t3=old #0");
}

#[test]
fn hard_links_of_hidden_targets_do_not_depend_on_order() {
    let lower = Tar::new().directory("d").file("d/a", "A").file("x", "X");
    for (first, second) in [(0, 1), (1, 0)] {
        let parts =
            [Tar::new().hardlink("b", "d/a").unfinished(), Tar::new().mark(".wh.d").unfinished()];
        let layer = Tar::new().raw(&parts[first]).raw(&parts[second]);
        rule([lower.clone(), layer], "b=A\n x=X");
        let parts = [
            Tar::new().hardlink("d/b", "d/a").unfinished(),
            Tar::new().mark("d/.wh..wh..opq").unfinished(),
        ];
        let layer = Tar::new().raw(&parts[first]).raw(&parts[second]);
        rule([lower.clone(), layer], "d/\n d/b=A\n x=X");
    }
    // In the next layer it is gone for good.
    refused(
        [lower, Tar::new().mark(".wh.d"), Tar::new().hardlink("b", "d/a")],
        &["layer 3", "b", "d/a"],
    );
}

#[test]
fn whiteouts_spare_hard_links_of_their_own_layer() {
    let lower = Tar::new().file("a", "A").file("b", "B");
    rule([lower.clone(), Tar::new().hardlink("b", "a").mark(".wh.b")], "a=A #0\n b=A #0");
    rule([lower.clone(), Tar::new().mark(".wh.b").hardlink("b", "a")], "a=A #0\n b=A #0");
    rule([lower, Tar::new().hardlink("b", "a").mark(".wh..wh..opq")], "b=A");
}

#[test]
fn hard_links_to_anything_but_directories() {
    let all = Tar::new()
        .symlink("s", "target")
        .hardlink("s2", "s")
        .entry(Entry::new(b'6', "p"))
        .hardlink("p2", "p")
        .entry(Entry::new(b'3', "c").device(1, 3))
        .hardlink("c2", "c");
    rule([all], "c c1:3 #0\n c2 c1:3 #0\n p p #1\n p2 p #1\n s->target #2\n s2->target #2");
    refused(
        [Tar::new().directory("d").hardlink("l", "d")],
        &["layer 1", ": l:", "\"d\"", "directory"],
    );
    refused([Tar::new().hardlink("l", "/")], &["directory"]);
}

#[test]
fn hard_links_by_any_spelling_and_with_parents_made() {
    rule(
        [Tar::new().file("./a", "1").hardlink("./b", "./a").hardlink("c", "/a")],
        "a=1 #0\n b=1 #0\n c=1 #0",
    );
    rule(
        [Tar::new().file("a", "1").hardlink("x/y/b", "a")],
        "a=1 #0\n x/ @0\n x/y/ @0\n x/y/b=1 #0",
    );
    let through =
        Tar::new().directory("r").file("r/a", "1").symlink("l", "/r").hardlink("b", "l/a");
    rule([through], "b=1 #0\n l->/r\n r/\n r/a=1 #0");
}

#[test]
fn hard_links_to_nothing_are_refused() {
    refused([Tar::new().hardlink("l", "none").file("none", "1")], &["layer 1", ": l:", "\"none\""]);
    refused([Tar::new().hardlink("l", "l")], &["\"l\""]);
    refused([Tar::new().file("l", "1"), Tar::new().hardlink("l", "./l")], &["layer 2", "itself"]);
    refused([Tar::new().file("a", "1").hardlink("l", "d/../a")], &["link target", ".."]);
    refused([Tar::new().file("a", "1").hardlink("l", "")], &["link target", "empty"]);
}

#[test]
fn linked_parents_are_followed_inside_the_root() {
    let lower = Tar::new().directory("usr").directory("usr/lib").symlink("lib", "usr/lib");
    rule(
        [lower.clone(), Tar::new().file("lib/new", "1")],
        "lib->usr/lib\n usr/\n usr/lib/\n usr/lib/new=1",
    );
    rule(
        [lower.clone(), Tar::new().file("lib/x/new", "1")],
        "lib->usr/lib\n usr/\n usr/lib/\n usr/lib/x/ @0\n usr/lib/x/new=1",
    );
    rule(
        [lower.clone(), Tar::new().directory("lib/d")],
        "lib->usr/lib\n usr/\n usr/lib/\n usr/lib/d/",
    );
    // Absolute, and upwards beyond the root: both stay inside.
    let absolute = Tar::new().symlink("a", "/r").directory("r").file("a/f", "1");
    rule([absolute], "a->/r\n r/\n r/f=1");
    let up = Tar::new().directory("d").symlink("d/up", "../../../r/./x").file("d/up/f", "1");
    rule([up], "d/\n d/up->../../../r/./x\n r/ @0\n r/x/ @0\n r/x/f=1");
    // To where nothing is: made there. Chains of links too.
    let dangling = Tar::new().symlink("a", "b").symlink("b", "c/d").file("a/f", "1");
    rule([dangling], "a->b\n b->c/d\n c/ @0\n c/d/ @0\n c/d/f=1");
    // A link as the last component is replaced, not followed.
    rule([lower, Tar::new().file("lib", "1")], "lib=1\n usr/\n usr/lib/");
    let circle = Tar::new().symlink("a", "b").symlink("b", "a").file("a/f", "1");
    refused([circle], &["a/f", "symbolic links"]);
}

#[test]
fn types_replace_each_other() {
    let things: [(Tar, &str); 6] = [
        (Tar::new().file("p", "1"), "p=1"),
        (Tar::new().directory("p").file("p/in", "2"), "p/\n p/in=2"),
        (Tar::new().symlink("p", "there"), "p->there"),
        (Tar::new().entry(Entry::new(b'6', "p")), "p p"),
        (Tar::new().entry(Entry::new(b'4', "p").device(259, 300)), "p b259:300"),
        (Tar::new().file("q", "3").hardlink("p", "q"), "p=3 #0\n q=3 #0"),
    ];
    for (lower, _) in &things[..5] {
        for (upper, expected) in &things {
            rule([lower.clone(), upper.clone()], expected);
            // The same within one layer: the last one wins.
            let both = Tar::new().raw(&lower.clone().unfinished()).raw(&upper.clone().unfinished());
            rule([both], expected);
        }
    }
    // A file where a parent should be makes way.
    rule([Tar::new().file("p", "1"), Tar::new().file("p/in", "2")], "p/ @0\n p/in=2");
}

#[test]
fn directories_over_directories() {
    let lower = Tar::new()
        .entry(
            Entry::new(b'5', "d").mode(0o700).owner(5, 6).mtime(1).pax("SCHILY.xattr.user.a", "1"),
        )
        .file("d/f", "1");
    let upper = Tar::new().entry(Entry::new(b'5', "d").mode(0o1777).owner(7, 8).mtime(2));
    rule([lower.clone(), upper], "d/ 1777 7:8 @2\n d/f=1");
    // A child added does not touch its directory.
    rule([lower, Tar::new().file("d/g", "2")], "d/ 700 5:6 @1 user.a=1\n d/f=1\n d/g=2");
}

#[test]
fn names_in_any_spelling() {
    let layer =
        Tar::new().file("/abs/f", "1").file("./dot/f", "2").file("x//y/./z", "3").directory("t/");
    rule([layer], "abs/ @0\n abs/f=1\n dot/ @0\n dot/f=2\n t/\n x/ @0\n x/y/ @0\n x/y/z=3");
    rule(
        [Tar::new().file("caf\u{e9}", "1").file(b"caf\xe9", "2").file("a\\b\n", "3")],
        "a\\\\b\\n=3\n caf\\xc3\\xa9=1\n caf\\xe9=2",
    );
    rule([Tar::new().file("...", "1").file("..a", "2").file("a..", "3")], "...=1\n ..a=2\n a..=3");
    for bad in ["../evil", "a/../../evil", "a/../b", ".."] {
        refused([Tar::new().file(bad, "1")], &["layer 1", bad, ".."]);
    }
    refused([Tar::new().file("", "1")], &["empty"]);
    refused([Tar::new().file("x".repeat(256), "1")], &["256 bytes"]);
    refused([Tar::new().file(["x"; 2100].join("/"), "1")], &["4199 bytes"]);
    let long = format!("{}/{}", "n".repeat(255), "m".repeat(255));
    rule(
        [Tar::new().file(&long, "1").symlink("s", "q".repeat(300))],
        &format!("{}/ @0\n{long}=1\ns->{}", "n".repeat(255), "q".repeat(300)),
    );
}

#[test]
fn the_root_has_attributes() {
    let layer = Tar::new().entry(
        Entry::new(b'5', "./").mode(0o711).owner(1, 2).mtime(3).pax("SCHILY.xattr.user.r", "v"),
    );
    rule([layer.file("f", "1")], "./ 711 1:2 @3 user.r=v\n f=1");
    refused([Tar::new().file(".", "1")], &["root"]);
    refused([Tar::new().symlink("/", "x")], &["root"]);
    rule([Tar::new()], "");
}

#[test]
fn entries_given_twice() {
    let twice = Tar::new().entry(Entry::new(b'0', "f").data("1").mode(0o600)).file("f", "22");
    rule([twice], "f=22");
}

#[test]
fn metadata_as_it_is() {
    let layer = Tar::new()
        .entry(Entry::new(b'0', "su").mode(0o4755).owner(0, 42))
        .entry(Entry::new(b'0', "sg").mode(0o2755))
        .entry(Entry::new(b'5', "t").mode(0o1777))
        .entry(Entry::new(b'0', "none").mode(0o100_000))
        .entry(Entry::new(b'0', "u1").owner(70_000, 3_000_000))
        .entry(Entry::new(b'0', "u2").owner(4_294_967_294, 4_294_967_294))
        .entry(Entry::new(b'3', "c").device(4095, 1_048_575).mode(0o666))
        .entry(Entry::new(b'2', "l").link("x").mode(0o600));
    rule(
        [layer],
        "c c4095:1048575 666\n l->x\n none= 0\n sg= 2755\n su= 4755 0:42\n t/ 1777\n u1= 70000:3000000\n u2= 4294967294:4294967294",
    );
    let id = Tar::new().entry(Entry::new(b'0', "f").owner(4_294_967_295, 0));
    refused([id], &["layer 1", ": f:", "uid"]);
    let id = Tar::new().entry(Entry::new(b'0', "f").pax("gid", "4294967296"));
    refused([id], &["gid"]);
}

#[test]
fn times() {
    let layer = Tar::new()
        .entry(Entry::new(b'0', "a").pax("mtime", "-1.5"))
        .entry(Entry::new(b'0', "b").pax("mtime", "4294967296.123456789"))
        .entry(Entry::new(b'0', "c").mtime(u64::MAX))
        .entry(Entry::new(b'0', "d").pax("mtime", "2208988800"));
    rule([layer], "a= @-2.500000000\n b= @4294967296.123456789\n c= @-1\n d= @2208988800");
}

#[test]
fn extended_attributes() {
    let capability = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let namespaced = b"\x01\0\0\x03\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0\xe8\x03\0\0";
    let layer = Tar::new()
        .entry(
            Entry::new(b'0', "f")
                .pax("SCHILY.xattr.user.a", b"\0\n=\xff")
                .pax("SCHILY.xattr.user.empty", "")
                .pax("SCHILY.xattr.security.capability", capability),
        )
        .entry(Entry::new(b'0', "g").pax("SCHILY.xattr.security.capability", namespaced))
        .entry(
            Entry::new(b'0', "h")
                .pax("LIBARCHIVE.xattr.user.b%20c", "aGVsbG8")
                .pax("LIBARCHIVE.xattr.user.both", "bG9zZXM")
                .pax("SCHILY.xattr.user.both", "wins"),
        )
        .entry(Entry::new(b'0', "i").pax("SCHILY.xattr.com.apple.x", "dropped"));
    rule(
        [layer],
        r"
        f= security.capability=\x01\x00\x00\x02\x00 \x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00 user.a=\x00\n=\xff user.empty=
        g= security.capability=\x01\x00\x00\x03\x00 \x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xe8\x03\x00\x00
        h= user.b c=hello user.both=wins
        i=",
    );
}

#[test]
fn access_control_lists() {
    let acl = |entries: &[(u16, u16, u32)]| {
        let mut value = vec![2, 0, 0, 0];
        for (tag, bits, id) in entries {
            value.extend(tag.to_le_bytes());
            value.extend(bits.to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        value
    };
    const NONE: u32 = u32::MAX;
    let full = acl(&[(1, 6, NONE), (2, 6, 1234), (4, 4, NONE), (16, 6, NONE), (32, 4, NONE)]);
    let minimal = acl(&[(1, 6, NONE), (4, 4, NONE), (32, 4, NONE)]);
    let layer = Tar::new()
        .entry(Entry::new(b'0', "f").mode(0o664).pax("SCHILY.xattr.system.posix_acl_access", &full))
        .entry(
            Entry::new(b'5', "d")
                .mode(0o664)
                .pax("SCHILY.xattr.system.posix_acl_default", &minimal),
        )
        .entry(Entry::new(b'0', "m").pax("SCHILY.xattr.system.posix_acl_access", &minimal));
    let shown = |value: &[u8]| value.escape_ascii().to_string();
    rule(
        [layer],
        &format!(
            "d/ 664 system.posix_acl_default={}\nf= 664 system.posix_acl_access={}\nm=",
            shown(&minimal),
            shown(&full)
        ),
    );
    let broken = Tar::new()
        .entry(Entry::new(b'0', "f").pax("SCHILY.xattr.system.posix_acl_access", "broken"));
    refused([broken], &["layer 1", ": f:", "posix_acl_access"]);
}

//! Dockerfiles that are judged. Every one starts from the same small root filesystem, whose tar
//! is in the context as `rootfs.tar`; `BASE` stands for the two lines that bring it in.

/// Something in a build context.
#[derive(Clone, Copy)]
pub enum Item {
    /// A file of mode 0644.
    File(&'static str, &'static str),
    /// A file of another mode.
    Mode(&'static str, &'static str, u32),
    /// A directory and its mode.
    Dir(&'static str, u32),
    /// A symbolic link and its target.
    Link(&'static str, &'static str),
    /// An archive of `archive/` below, named for its compression.
    Tar(&'static str),
}

use Item::{Dir, File, Link, Mode, Tar};

/// One Dockerfile.
pub struct Input {
    pub name: &'static str,
    pub context: &'static [Item],
    pub dockerfile: &'static str,
    pub args: &'static [(&'static str, &'static str)],
    pub target: Option<&'static str>,
}

const fn case(name: &'static str, context: &'static [Item], dockerfile: &'static str) -> Input {
    Input { name, context, dockerfile, args: &[], target: None }
}

const TREE: &[Item] = &[
    File("a.txt", "a"),
    File("b.txt", "bb"),
    Mode("run.sh", "#!/bin/sh\n", 0o755),
    File(".hidden", "h"),
    Dir("dir", 0o700),
    File("dir/one", "1"),
    File("dir/.two", "2"),
    Dir("dir/sub", 0o711),
    File("dir/sub/three", "3"),
    Dir("dir2", 0o755),
    File("dir2/four", "4"),
    Dir("empty", 0o750),
    Link("link-file", "a.txt"),
    Link("link-dir", "dir"),
    Link("dir/rel", "../a.txt"),
    Link("dir/abs", "/etc/passwd"),
    Link("dir/broken", "nowhere"),
    File("spa ce", "s"),
    File("ünï", "u"),
];

/// Judged by BuildKit and buildah.
pub const CASES: &[Input] = &[
    case("copy-file", TREE, "BASE\nCOPY a.txt /new\n"),
    case("copy-file-into-directory", TREE, "BASE\nCOPY a.txt /tmp\nCOPY b.txt /n/e/w/\n"),
    case("copy-executable", TREE, "BASE\nCOPY run.sh /run.sh\n"),
    case("copy-several", TREE, "BASE\nCOPY a.txt b.txt dir /d/\n"),
    case("copy-directory-contents", TREE, "BASE\nCOPY dir /new\nCOPY dir/ /new2/\n"),
    case("copy-directory-mode", TREE, "BASE\nCOPY empty /new/deep\n"),
    case(
        "copy-directory-merges",
        TREE,
        "BASE\nRUN mkdir -p /d/sub && echo old >/d/one && echo kept >/d/sub/kept && chmod 705 /d /d/sub\nCOPY dir /d\n",
    ),
    case("copy-directory-onto-itself", TREE, "BASE\nCOPY dir /d\nCOPY dir2 /d\nCOPY dir/sub /d\n"),
    case(
        "copy-dot",
        &[File("x", "1"), Dir("y", 0o755), File("y/z", "2"), File(".dot", "3")],
        "BASE\nCOPY . /all\n",
    ),
    case("copy-dotfiles", TREE, "BASE\nCOPY .hidden dir/.two /x/\n"),
    case("copy-glob", TREE, "BASE\nCOPY *.txt /x/\n"),
    case("copy-glob-directories", TREE, "BASE\nCOPY dir* /x/\n"),
    case(
        "copy-glob-question-class",
        TREE,
        "BASE\nCOPY ?.txt /q/\nCOPY [b-z].txt /c/\nCOPY [^b].txt /n/\n",
    ),
    case("copy-glob-nested", TREE, "BASE\nCOPY d*/o* dir/s*/* /x/\n"),
    case("copy-glob-nothing-besides", TREE, "BASE\nCOPY a.txt nothing* /x/\n"),
    case("copy-star-takes-dotfiles", &[File(".d", "1"), File("e", "2")], "BASE\nCOPY * /x/\n"),
    case("copy-link-top-is-followed", TREE, "BASE\nCOPY link-file /lf\nCOPY link-dir /ld\n"),
    case("copy-links-inside-stay", TREE, "BASE\nCOPY dir /d\n"),
    case(
        "copy-to-linked-directory",
        TREE,
        "BASE\nRUN mkdir /real && ln -s /real /alias\nCOPY a.txt /alias/x\nCOPY dir2 /alias\n",
    ),
    case("copy-to-lib-link", TREE, "BASE\nCOPY a.txt /lib/x.so\n"),
    case("copy-over-link", TREE, "BASE\nRUN echo t >/target && ln -s /target /l\nCOPY a.txt /l\n"),
    case(
        "copy-over-file",
        TREE,
        "BASE\nRUN echo old >/f && chmod 600 /f && chown 5:6 /f\nCOPY a.txt /f\n",
    ),
    case("copy-empty-directory", TREE, "BASE\nCOPY empty /e\n"),
    case("copy-json", TREE, "BASE\nCOPY [\"spa ce\", \"/with space/\"]\n"),
    case("copy-unicode", TREE, "BASE\nCOPY ünï /ü/\n"),
    case(
        "copy-relative",
        TREE,
        "BASE\nWORKDIR /w\nCOPY a.txt .\nCOPY b.txt sub/\nCOPY dir2 ./\nCOPY a.txt ../up\n",
    ),
    case("copy-variable", TREE, "BASE\nARG F=a\nENV D=/dd\nCOPY ${F}.txt $D/\n"),
    case("copy-chown-numbers", TREE, "BASE\nCOPY --chown=12:34 dir /n/e/w\n"),
    case(
        "copy-chown-names",
        TREE,
        "BASE\nCOPY --chown=app:staff a.txt /x\nCOPY --chown=app dir2 /y/\n",
    ),
    case("copy-chown-number-alone", TREE, "BASE\nCOPY --chown=77 a.txt /x\n"),
    case("copy-chown-links", TREE, "BASE\nCOPY --chown=9:8 dir /x/\n"),
    case("copy-chmod", TREE, "BASE\nCOPY --chmod=640 a.txt run.sh /x/\n"),
    case(
        "copy-from-stage",
        TREE,
        "BASE AS one\nRUN mkdir /o && echo 1 >/o/f && chown 7:8 /o/f && chmod 4755 /o/f\nBASE\nCOPY --from=one /o /p\nCOPY --from=0 /o/f /q\n",
    ),
    case(
        "copy-from-stage-hardlinks",
        TREE,
        "BASE AS one\nRUN mkdir /o && echo 1 >/o/a && ln /o/a /o/b && ln -s a /o/c\nFROM scratch\nCOPY --from=one /o /o\n",
    ),
    case(
        "copy-from-stage-absolute-link",
        TREE,
        "BASE AS one\nRUN mkdir /real && echo 1 >/real/f && ln -s /real /alias\nFROM scratch\nCOPY --from=one /alias/f /f\nCOPY --from=one /alias /d\n",
    ),
    case(
        "copy-from-stage-glob",
        TREE,
        "BASE AS one\nRUN mkdir /o && touch /o/a1 /o/a2 /o/b\nFROM scratch\nCOPY --from=one /o/a* /x/\n",
    ),
    case("scratch-only", TREE, "FROM scratch\nCOPY a.txt /x\nENV A=1\n"),
    case(
        "ignore",
        &[
            File(".dockerignore", "# c\n*.md\n!keep.md\nd/e\n"),
            File("a.md", ""),
            File("keep.md", ""),
            Dir("d", 0o755),
            File("d/e", ""),
            File("d/f", ""),
            File("d/x.md", ""),
        ],
        "BASE\nCOPY . /x\n",
    ),
    case(
        "ignore-everything-but",
        &[
            File(".dockerignore", "*\n!rootfs.tar\n!src/keep\n"),
            Dir("src", 0o755),
            File("src/keep", "1"),
            File("src/not", "2"),
            File("top", "3"),
        ],
        "BASE\nCOPY . /x\n",
    ),
    case(
        "ignore-double-star",
        &[
            File(".dockerignore", "**/*.o\n**/tmp/**\n"),
            File("a.o", ""),
            Dir("s", 0o755),
            File("s/b.o", ""),
            File("s/b.c", ""),
            Dir("s/tmp", 0o755),
            File("s/tmp/x", ""),
        ],
        "BASE\nCOPY . /x\n",
    ),
    case(
        "ignore-order",
        &[
            File(".dockerignore", "!a\na\nb\n!b\nc/*\n!c/d\n"),
            File("a", ""),
            File("b", ""),
            Dir("c", 0o755),
            File("c/d", ""),
            File("c/e", ""),
        ],
        "BASE\nCOPY . /x\n",
    ),
    case(
        "ignore-glob-source",
        &[File(".dockerignore", "*.log\n"), File("a.log", ""), File("a.txt", "")],
        "BASE\nCOPY a.* /x/\n",
    ),
    case("add-file", TREE, "BASE\nADD a.txt /x/\n"),
    case("add-tar", &[Tar("t.tar")], "BASE\nADD t.tar /x/\n"),
    case("add-tar-no-slash", &[Tar("t.tar")], "BASE\nADD t.tar /x\n"),
    case("add-tar-gz", &[Tar("t.tar.gz")], "BASE\nADD t.tar.gz /x/\n"),
    case("add-tar-bz2", &[Tar("t.tar.bz2")], "BASE\nADD t.tar.bz2 /x/\n"),
    case("add-tar-xz", &[Tar("t.tar.xz")], "BASE\nADD t.tar.xz /x/\n"),
    case("add-tar-any-name", &[Tar("data")], "BASE\nADD data /x/\n"),
    case(
        "add-tar-merges",
        &[Tar("t.tar")],
        "BASE\nRUN mkdir -p /x/t && echo old >/x/t/file && echo kept >/x/t/kept && chmod 700 /x/t\nADD t.tar /x/\n",
    ),
    case("add-no-tar", &[File("t.tar", "not a tar")], "BASE\nADD t.tar /x/\n"),
    case("add-several", &[Tar("t.tar"), File("f", "1")], "BASE\nADD t.tar f /x/\n"),
    case("copy-tar-stays", &[File("t.tar", "not unpacked")], "BASE\nCOPY t.tar /x/\n"),
    case(
        "env",
        &[],
        "BASE\nENV A=1 B=\"two words\" C=a\\ b D='$A'\nENV E=$A-${B}\nENV A=2 F=$A\nENV G=${NO:-default} H=${A:+set} I=${NO:+set}\n",
    ),
    case("env-old-form", &[], "BASE\nENV A one two   three\nENV B \"quoted\"\n"),
    case("env-path", &[], "BASE\nENV PATH=/opt/bin:$PATH\nRUN echo $PATH >/p\n"),
    case("env-escapes", &[], "BASE\nENV A=\\$B C=\"\\$D\" E=a\\\"b F=\"x\\\\y\"\n"),
    Input {
        args: &[("V", "passed")],
        ..case(
            "arg",
            &[],
            "ARG V=default\nBASE\nARG V\nARG W=w-$V\nARG X\nENV E=$V-$W-$X\nRUN echo $V $W >/f\n",
        )
    },
    case("arg-default", &[], "ARG V=default\nBASE\nARG V\nARG V2=own\nENV E=$V-$V2\n"),
    case("arg-in-from", &[], "ARG B=scratch\nFROM $B\nCOPY rootfs.tar /x\nRUNLESS"),
    case("arg-not-in-environment", &[], "BASE\nARG SECRET=1\nRUN echo $SECRET >/f\n"),
    case(
        "arg-scope",
        &[],
        "BASE AS a\nARG A=1\nRUN echo \"[$A]\" >/f\nBASE\nRUN echo \"[$A]\" >/g\nCOPY --from=a /f /f\n",
    ),
    case("env-after-arg", &[], "BASE\nARG V=arg\nENV V=env\nRUN echo $V >/f\n"),
    case(
        "label",
        &[],
        "BASE\nLABEL a=1 \"b c\"=\"d e\" f.g='h'\nLABEL i=line\\\n2\nLABEL old form\n",
    ),
    case("workdir", &[], "BASE\nWORKDIR /a\nWORKDIR b\nWORKDIR ../c\nRUN pwd >/f\n"),
    case("workdir-variable", &[], "BASE\nENV D=/x/y\nWORKDIR $D/z\n"),
    case(
        "workdir-exists",
        &[],
        "BASE\nRUN mkdir /d && chmod 700 /d && chown 5:5 /d\nWORKDIR /d/e\n",
    ),
    case(
        "user-run",
        &[],
        "BASE\nRUN mkdir -m 777 /w\nUSER app\nRUN id >/w/id && touch /w/mine\nUSER 1234:99\nRUN id >/w/id2\nUSER app:staff\nRUN id >/w/id3\n",
    ),
    case("user-copy", TREE, "BASE\nUSER app\nCOPY a.txt /x\n"),
    case(
        "home",
        &[],
        "BASE\nRUN mkdir -m 777 /w && echo $HOME >/h && pwd >>/h\nUSER app\nRUN echo $HOME >/w/h2\n",
    ),
    case("cmd-forms", &[], "BASE\nCMD echo $HOME\nCMD [\"a\", \"b c\"]\n"),
    case("cmd-shell", &[], "BASE\nCMD echo \"x  y\" && z\n"),
    case("entrypoint-clears-cmd", &[], "BASE AS a\nCMD [\"old\"]\nFROM a\nENTRYPOINT [\"e\"]\n"),
    case("entrypoint-and-cmd", &[], "BASE\nENTRYPOINT [\"e\"]\nCMD [\"c\"]\n"),
    case("entrypoint-shell", &[], "BASE\nENTRYPOINT exec top -b\n"),
    case("shell", &[], "BASE\nSHELL [\"/bin/ash\", \"-ec\"]\nRUN echo $0 >/f\nCMD x\n"),
    case("expose", &[], "BASE\nEXPOSE 80 443/tcp 53/udp\nARG P=99\nEXPOSE $P\n"),
    case("volume", &[], "BASE\nVOLUME /data\nVOLUME [\"/a\", \"/b c\"]\n"),
    case("stopsignal", &[], "BASE\nSTOPSIGNAL SIGINT\n"),
    case(
        "healthcheck",
        &[],
        "BASE\nHEALTHCHECK --interval=5s --timeout=1m --start-period=2s --retries=3 CMD wget -q x || exit 1\n",
    ),
    case("healthcheck-exec", &[], "BASE\nHEALTHCHECK CMD [\"a\", \"b\"]\n"),
    case("healthcheck-none", &[], "BASE AS a\nHEALTHCHECK CMD x\nFROM a\nHEALTHCHECK NONE\n"),
    case(
        "run-exec-form",
        &[],
        "BASE\nENV V=1\nRUN [\"/bin/sh\", \"-c\", \"echo $V >/f\"]\nRUN [\"touch\", \"/a b\"]\n",
    ),
    case("run-removes", TREE, "BASE\nCOPY dir /d\nRUN rm /d/one && rm -r /d/sub\n"),
    case(
        "run-replaces-directory",
        TREE,
        "BASE\nCOPY dir /d\nRUN rm -r /d && mkdir /d && echo new >/d/new\n",
    ),
    case(
        "run-replaces-kinds",
        TREE,
        "BASE\nCOPY dir /d\nRUN rm /d/one && mkdir /d/one && rm -r /d/sub && echo f >/d/sub\n",
    ),
    case("run-renames-directory", TREE, "BASE\nCOPY dir /d\nRUN mv /d /e\n"),
    case(
        "run-changes-metadata",
        TREE,
        "BASE\nCOPY dir /d\nRUN chmod 4711 /d/one && chown 3:4 /d/sub && chmod 1777 /d\n",
    ),
    case(
        "run-hardlinks",
        &[],
        "BASE\nRUN mkdir /h && echo 1 >/h/a && ln /h/a /h/b && ln /h/a /h/c\n",
    ),
    case("run-hardlink-to-lower", TREE, "BASE\nCOPY a.txt /f\nRUN ln /f /g\n"),
    case("run-special-files", &[], "BASE\nRUN mkfifo /p && mknod /c c 1 3 && mknod /b b 7 0\n"),
    case("run-root-directory-mode", &[], "BASE\nRUN chmod 711 /\n"),
    case(
        "run-umask-and-modes",
        &[],
        "BASE\nRUN umask >/u; mkdir /d1; touch /f1; umask 077; mkdir /d2; touch /f2\n",
    ),
    case(
        "run-environment",
        &[],
        "BASE\nENV Z=1\nARG Y=2\nRUN env | grep -v ^HOSTNAME= | sort >/env\n",
    ),
    case(
        "run-capabilities",
        &[],
        "BASE\nRUN mkdir -m 777 /w && grep ^Cap /proc/self/status >/caps\nUSER app\nRUN grep ^Cap /proc/self/status >/w/caps\n",
    ),
    case("run-stdin-is-empty", &[], "BASE\nRUN cat >/f\n"),
    case(
        "mount-cache",
        &[],
        "BASE\nRUN --mount=type=cache,target=/c echo 1 >/c/f\nRUN --mount=type=cache,target=/c cat /c/f >/g\n",
    ),
    case("mount-bind", TREE, "BASE\nRUN --mount=type=bind,source=dir,target=/m ls -A /m >/f\n"),
    case(
        "mount-bind-stage",
        &[],
        "BASE AS a\nRUN echo 1 >/x\nBASE\nRUN --mount=from=a,source=/x,target=/m/x cat /m/x >/f\n",
    ),
    case("mount-tmpfs", &[], "BASE\nRUN --mount=type=tmpfs,target=/t touch /t/x && ls /t >/f\n"),
    case(
        "mount-secret",
        &[],
        "BASE\nRUN --mount=type=secret,id=tok wc -c </run/secrets/tok >/f && stat -c '%a %u %g' /run/secrets/tok >>/f\n",
    ),
    Input {
        target: Some("two"),
        ..case(
            "target",
            TREE,
            "BASE AS one\nRUN echo 1 >/one\nFROM one AS two\nRUN echo 2 >/two\nFROM two AS three\nRUN false\n",
        )
    },
    case(
        "stage-inherits",
        TREE,
        "BASE AS a\nENV A=1\nWORKDIR /w\nUSER app\nLABEL l=1\nEXPOSE 1\nCMD [\"c\"]\nFROM a\nCOPY a.txt x\nENV B=$A\n",
    ),
    case("escape-directive", &[], "# escape=`\nBASE\nRUN echo a `\n  b >/f\nENV W=C:\\x\n"),
    case(
        "comments-and-continuations",
        &[],
        "BASE\n# c\nRUN echo a \\\n# inside\n   && echo b >/f \\\n\n   && true\nENV A=1 \\\n    # too\n    B=2\n",
    ),
    case("maintainer", &[], "BASE\nMAINTAINER Some One\n"),
];

/// Mount points that BuildKit 20.10 leaves in a layer and current BuildKit removes, as here.
pub const MOUNT_POINTS: &[(&str, &[&str])] = &[
    ("mount-cache", &["/c"]),
    ("mount-bind", &["/m"]),
    ("mount-bind-stage", &["/m"]),
    ("mount-tmpfs", &["/t"]),
    ("mount-secret", &["/run", "/run/secrets"]),
];

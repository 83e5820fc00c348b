use super::*;
use crate::plan::{Copy, CopySource, Run};

struct Images;

impl BaseImages for Images {
    fn resolve(&mut self, reference: &str, _: &Platform) -> Result<BaseImage, String> {
        if !reference.starts_with("img") {
            return Err("there is no such image here".to_owned());
        }
        let config = ImageConfig {
            env: vec!["PATH=/img".into(), "FROM_IMAGE=yes".into()],
            cmd: Some(vec!["old".into()]),
            working_dir: "/base".into(),
            user: if reference == "img:user" { "app".into() } else { String::new() },
            on_build: (reference == "img:onbuild").then(|| "RUN x".into()).into_iter().collect(),
            ..ImageConfig::default()
        };
        Ok(BaseImage { digest: "sha256:00".into(), config })
    }
}

fn plan_with(text: &str, change: impl FnOnce(&mut LowerOptions)) -> BuildPlan {
    let mut options = LowerOptions {
        platform: Platform::parse("linux/amd64").unwrap(),
        build_platform: Platform::parse("linux/amd64").unwrap(),
        ..LowerOptions::default()
    };
    change(&mut options);
    lower(text, &options, &mut Images).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn plan(text: &str) -> BuildPlan {
    plan_with(text, |_| {})
}

fn refusal_with(text: &str, change: impl FnOnce(&mut LowerOptions)) -> String {
    let mut options = LowerOptions::default();
    change(&mut options);
    lower(text, &options, &mut Images).expect_err(text).to_string()
}

fn last(plan: &BuildPlan) -> &Stage {
    plan.stages.last().unwrap()
}

fn run(plan: &BuildPlan) -> &Run {
    let action = last(plan).steps.iter().rev().find_map(|step| match &step.action {
        Action::Run(run) => Some(run),
        _ => None,
    });
    action.unwrap()
}

fn copy(plan: &BuildPlan) -> &Copy {
    let action = last(plan).steps.iter().rev().find_map(|step| match &step.action {
        Action::Copy(copy) => Some(copy),
        _ => None,
    });
    action.unwrap()
}

fn env<'a>(lines: &'a [String], name: &str) -> Option<&'a str> {
    lines.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
}

#[test]
fn arguments_and_environment_have_scopes() {
    let with_arg = |plan: &mut LowerOptions| {
        plan.build_args.insert("V".into(), "9".into());
    };
    let text = "ARG V=1\nARG W=w$V\nFROM img:$V AS a\nARG V\nARG W\nARG X=x-$V\nENV E=$X\nRUN a\n";
    let plain = plan(text);
    assert!(matches!(&last(&plain).base, Base::Image(i) if i.reference == "img:1"));
    assert_eq!(env(&run(&plain).env, "E"), Some("x-1"));
    assert_eq!(env(&run(&plain).env, "W"), Some("w1"));
    assert_eq!(env(&last(&plain).config.env, "X"), None, "ARG never becomes runtime ENV");
    let passed = plan_with(text, with_arg);
    assert!(matches!(&last(&passed).base, Base::Image(i) if i.reference == "img:9"));
    assert_eq!(env(&last(&passed).config.env, "E"), Some("x-9"));
    // A global argument is not seen in a stage that does not declare it.
    let plan2 = plan("ARG V=1\nFROM img\nRUN a\n");
    assert_eq!(env(&run(&plan2).env, "V"), None);
    // A stage on another inherits its ARGs; a sibling does not.
    let plan3 = plan("FROM img AS a\nARG A=1\nFROM a\nRUN x\n");
    assert_eq!(env(&run(&plan3).env, "A"), Some("1"));
    let plan4 = plan("FROM img AS a\nARG A=1\nFROM img\nCOPY --from=a / /\nRUN x\n");
    assert_eq!(env(&run(&plan4).env, "A"), None);
    // Values of one instruction see the state before it.
    let plan5 = plan("FROM img\nENV a=1\nENV a=2 b=$a\n");
    assert_eq!(env(&last(&plan5).config.env, "b"), Some("1"));
    // The image's own variables are there, and PATH always is.
    let plan6 = plan("FROM img\nENV P=$PATH:/x F=${FROM_IMAGE:+set}\n");
    assert_eq!(env(&last(&plan6).config.env, "P"), Some("/img:/x"));
    assert_eq!(env(&last(&plan6).config.env, "F"), Some("set"));
    assert!(env(&last(&plan("FROM scratch\nENV A=1")).config.env, "PATH").is_some());
    assert_eq!(
        plan("FROM img\nENV a b  c\n").stages[0].config.env.last().unwrap(),
        "a=b  c",
        "the old form takes the rest of the line"
    );
}

#[test]
fn automatic_platform_arguments() {
    let built = plan_with(
        "FROM --platform=$BUILDPLATFORM img\nARG TARGETARCH\nARG TARGETVARIANT\nRUN x\n",
        |o| {
            o.platform = Platform::parse("linux/arm/v7").unwrap();
        },
    );
    assert_eq!(env(&run(&built).env, "TARGETARCH"), Some("arm"));
    assert_eq!(env(&run(&built).env, "TARGETVARIANT"), Some("v7"));
    let Base::Image(image) = &last(&built).base else { panic!() };
    assert_eq!(image.platform.to_string(), "linux/amd64");
    // Not visible without a declaration.
    assert_eq!(env(&run(&plan("FROM img\nRUN x")).env, "TARGETARCH"), None);
}

#[test]
fn stages_are_pruned_and_ordered() {
    let text = "FROM img AS a\nFROM img AS unused\nRUN never\nFROM a AS b\nRUN b\n\
                FROM scratch\nCOPY --from=b /x /y\nCOPY --from=0 /z /\n";
    let built = plan(text);
    assert_eq!(built.stages.len(), 3);
    assert!(matches!(built.stages[1].base, Base::Stage { stage: 0 }));
    assert!(matches!(copy(&built).from, CopyFrom::Stage { stage: 0 }));
    let to_b = plan_with(text, |o| o.target = Some("B".into()));
    assert_eq!(to_b.stages.len(), 2);
    // A name that is no stage is an image.
    let image = plan("FROM scratch\nCOPY --from=img:2 /x /\n");
    assert!(matches!(&copy(&image).from, CopyFrom::Image(i) if i.reference == "img:2"));
    // A mount alone makes a stage needed.
    let mount = plan("FROM img AS a\nFROM img\nRUN --mount=from=a,target=/a x\n");
    assert_eq!(mount.stages.len(), 2);
    for kind in ["BIND", "$T", "Cache"] {
        let mount = plan(&format!(
            "FROM img AS a\nFROM img\nARG T=bind\nRUN --mount=type={kind},from=a,target=/a x\n"
        ));
        assert_eq!(mount.stages.len(), 2, "{kind}");
    }
    let named = plan_with("FROM scratch\nCOPY --from=src a /\n", |o| {
        o.contexts.insert("src".into(), NamedContext::Directory);
    });
    assert!(matches!(&copy(&named).from, CopyFrom::Named { name } if name == "src"));
}

#[test]
fn commands_shells_and_their_merging() {
    let built = plan("FROM img\nSHELL [\"/bin/bash\", \"-c\"]\nRUN a  b\nCMD c d\n");
    assert_eq!(run(&built).args, ["/bin/bash", "-c", "a  b"]);
    assert_eq!(last(&built).config.cmd.as_ref().unwrap()[2], "c d");
    assert_eq!(run(&plan("FROM img\nRUN [\"a b\", \"c\"]\n")).args, ["a b", "c"]);
    let entry = plan("FROM img\nENTRYPOINT [\"e\"]\n");
    assert_eq!(last(&entry).config.cmd, None, "the base's CMD belongs to its entrypoint");
    let both = plan("FROM img\nCMD [\"c\"]\nENTRYPOINT e\n");
    assert_eq!(last(&both).config.cmd.as_deref(), Some(&["c".to_owned()][..]));
    assert_eq!(last(&both).config.entrypoint.as_ref().unwrap()[0], "/bin/sh");
    assert_eq!(last(&plan("FROM img\nENTRYPOINT []\n")).config.entrypoint, None);
}

#[test]
fn heredocs() {
    let built = plan("FROM img\nRUN <<EOF\na\nb $x\nEOF\n");
    assert_eq!(run(&built).args, ["/bin/sh", "-c", "a\nb $x\n"]);
    let script = plan("FROM img\nRUN <<EOF\n#!/usr/bin/python3\nprint(1)\nEOF\n");
    assert_eq!(run(&script).args, ["/bin/sh", "-c", "/dev/pipes/EOF"]);
    assert!(run(&script).script.as_ref().unwrap().data.starts_with("#!/usr"));
    let redirected = plan("FROM img\nRUN cat <<A >/a && cat <<B >/b\n1\nA\n2\nB\n");
    assert_eq!(run(&redirected).args[2], "cat <<A >/a && cat <<B >/b\n1\nA\n2\nB");
    let files = plan("FROM img\nENV n=7\nCOPY <<a.txt <<-\"b\" /d/\nit's $n\na.txt\n\t$n\nb\n");
    let [CopySource::Inline(a), CopySource::Inline(b)] = copy(&files).sources.as_slice() else {
        panic!()
    };
    assert_eq!((a.name.as_str(), a.data.as_str()), ("a.txt", "it's 7\n"));
    assert_eq!((b.name.as_str(), b.data.as_str()), ("b", "$n\n"));
}

#[test]
fn copies_carry_all_their_flags() {
    let built = plan(
        "FROM img\nARG U=app\nWORKDIR sub\nCOPY --chown=$U:0 --chmod=u=rwX,go=rX --link --parents \
         --exclude=*.md --exclude=!a.md a b/./c d?.txt dest/\n",
    );
    let copy = copy(&built);
    assert_eq!(copy.dest, "/base/sub/dest/");
    assert_eq!(copy.chown.as_deref(), Some("app:0"));
    assert_eq!(copy.exclude, ["*.md", "!a.md"]);
    assert!(copy.link && copy.parents && !copy.unpack);
    assert_eq!(copy.sources.len(), 3);
    let add = plan("FROM img\nADD a.tar /x\n");
    assert!(self::copy(&add).unpack);
    assert!(!self::copy(&plan("FROM img\nADD --unpack=false a.tar /x\n")).unpack);
    let sum = "0".repeat(64);
    let url = plan(&format!("FROM img\nADD --checksum=sha256:{sum} https://h/p/f.tgz?x /d/\n"));
    assert!(!self::copy(&url).unpack);
    let CopySource::Url { name, checksum, .. } = &self::copy(&url).sources[0] else { panic!() };
    assert_eq!((name.as_str(), checksum.is_some()), ("f.tgz", true));
    for (dest, expected) in
        [(".", "/base/"), ("./", "/base/"), ("/", "/"), ("x", "/base/x"), ("../x/", "/x/")]
    {
        let plan = plan(&format!("FROM img\nCOPY a {dest}\n"));
        assert_eq!(self::copy(&plan).dest, expected, "{dest}");
    }
    assert!(matches!(
        &self::copy(&plan("FROM img\nCOPY [\"a b\", \"/x\"]\n")).sources[0],
        CopySource::Path { path } if path == "a b"
    ));
}

#[test]
fn run_mounts() {
    let built = plan(
        "FROM img\nARG D=/c\nRUN --mount=type=cache,target=$D,sharing=locked,uid=5 \
         --mount=type=bind,source=s,target=t,rw --mount=type=tmpfs,target=/t,size=64m \
         --mount=type=secret,id=tok,required --mount=type=secret,id=e,env=E --mount=type=ssh \
         --network=none x\n",
    );
    let run = run(&built);
    assert_eq!(run.network, crate::plan::Network::None);
    let targets: Vec<&str> = run.mounts.iter().map(|mount| mount.target.as_str()).collect();
    assert_eq!(
        targets,
        ["/c", "/base/t", "/t", "/run/secrets/tok", "", "/run/buildkit/ssh_agent.0"]
    );
    assert!(matches!(&run.mounts[0].source, MountSource::Cache { id, uid: 5, .. } if id == "/c"));
    assert!(!run.mounts[1].read_only && !run.mounts[0].read_only);
    assert!(matches!(run.mounts[2].source, MountSource::Tmpfs { size: Some(67_108_864) }));
    assert_eq!(built.secrets, BTreeMap::from([("e".into(), false), ("tok".into(), true)]));
}

#[test]
fn configuration() {
    let built = plan_with(
        "FROM img\nUSER a:b\nEXPOSE 80 90/udp 100-102\nVOLUME /a /b\nLABEL a=1 \"b c\"='d e'\n\
         STOPSIGNAL SIGINT\nHEALTHCHECK --interval=5s --retries=2 CMD curl -f x || exit 1\n\
         MAINTAINER me\n",
        |o| {
            o.labels.insert("a".into(), "2".into());
        },
    );
    let config = &last(&built).config;
    assert_eq!(config.exposed_ports.len(), 5);
    assert!(config.exposed_ports.contains("90/udp"));
    assert_eq!(config.labels["a"], "2");
    assert_eq!(config.labels["b c"], "d e");
    assert_eq!(config.healthcheck.as_ref().unwrap().test, ["CMD-SHELL", "curl -f x || exit 1"]);
    assert_eq!(config.healthcheck.as_ref().unwrap().interval, 5_000_000_000);
    assert_eq!(last(&built).author.as_deref(), Some("me"));
    let json = serde_json::to_value(config).unwrap();
    assert_eq!(json["ExposedPorts"]["80/tcp"], serde_json::json!({}));
    assert_eq!(serde_json::from_value::<ImageConfig>(json).unwrap(), *config);
    let none: ImageConfig =
        serde_json::from_str(r#"{"Env":null,"Labels":null,"Volumes":null,"OnBuild":null}"#)
            .unwrap();
    assert_eq!(none, ImageConfig::default());
}

#[test]
fn what_is_probably_a_mistake_is_said() {
    let built = plan_with("FROM img\nUSER $NOBODY\n", |o| {
        o.build_args.insert("TYPO".into(), "1".into());
    });
    assert_eq!(built.warnings.len(), 2);
    assert_eq!(built.warnings[0].at.line, 2);
    assert!(built.warnings[1].message.contains("TYPO"));
    assert!(plan("FROM img\nENV A=${B:-x}\n").warnings.is_empty());
}

#[test]
fn every_refusal_names_line_and_remedy() {
    for (text, expected) in [
        ("RUN x\n", "Dockerfile:1: there is no FROM; "),
        ("RUN x\nFROM img\n", "Dockerfile:1: RUN comes before the first FROM; "),
        ("FROM img\nFRUN x\n", "Dockerfile:2: unknown instruction \"FRUN\"; did you mean RUN?"),
        ("FROM $X\n", "Dockerfile:1: $X has no value in FROM's image; declare ARG X="),
        ("ARG XY=img\nFROM $XX\n", "did you mean $XY?"),
        ("ARG X=\nFROM $X\n", "FROM's image $X expands to nothing"),
        ("FROM --platform=windows/amd64 img\n", "is not Linux"),
        ("FROM a b\n", "FROM takes one image"),
        ("FROM img AS 1x\n", "is no name for a stage"),
        ("FROM img\nCOPY --form=x a b\n", "unsupported flag --form of COPY; did you mean --from?"),
        (
            "FROM img\nCOPY ----from=0 a b\n",
            "unsupported flag ----from of COPY; did you mean --from?",
        ),
        ("FROM img\nCOPY --chown a b\n", "has no value"),
        ("FROM img\nCOPY --link --link a b\n", "given twice"),
        ("FROM img\nCOPY a\n", "COPY has no destination"),
        ("FROM img\nCOPY \"a b\" /x\n", "write COPY [\"…\", \"…\"]"),
        ("FROM img\nCOPY --from=$X a b\n", "--from=$X holds a variable"),
        ("FROM img\nCOPY --from=3 a b\n", "there is no stage 3"),
        ("FROM img AS build\nFROM img\nCOPY --from=biuld a b\n", "did you mean the stage build?"),
        ("FROM img AS a\nCOPY --from=a x y\n", "copies from itself"),
        ("FROM img AS a\nCOPY --from=b x y\nFROM img AS b\nCOPY --from=a x y\n", "form a cycle"),
        ("FROM img AS a\nRUN --mount=from=b,target=/x y\nFROM a AS b\n", "form a cycle: "),
        ("FROM img\nCOPY --from=b x y\nFROM img AS b\nFROM 0\n", "there is no such image"),
        ("FROM img AS a\nCOPY --from=b x y\nFROM img AS b\nFROM a\n", "begins later, at line 3"),
        ("FROM nope\n", "Dockerfile:1: base image nope: there is no such image here"),
        ("FROM img:onbuild\n", "has ONBUILD triggers"),
        ("FROM img\nONBUILD RUN x\n", "Dockerfile:2: ONBUILD is not supported"),
        ("FROM img\nRUN --security=insecure x\n", "--security=insecure is not supported"),
        ("FROM img\nRUN --network=bridge x\n", "write default, none or host"),
        ("FROM img\nRUN --mount=type=bnd,target=/x y\n", "unsupported mount type"),
        ("FROM img\nRUN --mount=type=cache y\n", "there is no target"),
        ("FROM img\nRUN --mount=type=cache,target=/ y\n", "root directory"),
        ("FROM img\nRUN --mount=type=cache,taget=/x y\n", "did you mean target?"),
        ("FROM img\nRUN --mount=type=secret y\n", "the secret is not named"),
        ("FROM img\nRUN --device=gpu y\n", "no devices of the host"),
        (
            "FROM img\nENV TOK=1\nRUN --mount=type=secret,id=TOK y\n",
            "secret TOK is also set by ENV",
        ),
        ("FROM img\nADD https://h/r.git /x\n", "git sources are not supported"),
        ("FROM img\nCOPY ../up /x\n", "Dockerfile:2: COPY ../up leaves the build context"),
        ("FROM img\nADD a/../../up /x\n", "leaves the build context"),
        ("FROM img\nADD git@h:r /x\n", "git sources are not supported"),
        ("FROM img\nCOPY https://h/x /x\n", "write ADD for downloads"),
        ("FROM img\nADD --checksum=sha256:1 https://h/x /x\n", "is no SHA-256"),
        ("FROM img\nADD --checksum=x a /x\n", "exactly one http(s) source"),
        ("FROM img\nCOPY --chmod=999 a b\n", "is no mode"),
        ("FROM img\nCOPY --exclude=[ a b\n", "not a well-formed pattern"),
        ("FROM img\nEXPOSE 80:80\n", "not a port"),
        ("FROM img\nEXPOSE 0\n", "not a port"),
        ("FROM img\nENV A\n", "ENV A has no value"),
        ("FROM img\nENV A=1 B\n", "has no '='"),
        ("FROM img\nENV A=${B\n", "Dockerfile:2: ENV ${B: missing '}'"),
        ("FROM img\nENV A=${B:?missing}\n", "B: missing"),
        ("FROM img\nSTOPSIGNAL SIGFOO\n", "is no signal"),
        ("FROM img\nSHELL bash\n", "SHELL takes a JSON array"),
        ("FROM img\nHEALTHCHECK CMD\n", "HEALTHCHECK CMD without a command"),
        ("FROM img\nHEALTHCHECK --interval=5 CMD x\n", "is no duration"),
        ("FROM img\nWORKDIR $NO\n", "WORKDIR $NO expands to nothing"),
        ("FROM img\nCMD\n", "write CMD [] to clear it"),
        ("FROM img\nUSER --x a\n", "USER takes no flags"),
        ("# syntax=my/frontend\nFROM img\n", "not the Dockerfile's own"),
        ("FROM img\nRUN <<EOF\nx\n", "is never closed"),
    ] {
        let error = refusal_with(text, |_| {});
        assert!(error.contains(expected), "{text}\n got {error}\nwant {expected}");
        assert!(error.starts_with("Dockerfile:"), "{error}");
    }
    let error = refusal_with("FROM img AS run\n", |o| o.target = Some("rnu".into()));
    assert_eq!(error, "Dockerfile: there is no stage \"rnu\" (--target); did you mean run?");
}

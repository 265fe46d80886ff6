//! Which system calls a sandbox may make: everything, except what is listed here. Pure.
//!
//! The list holds calls that reach beyond the sandbox, that change what it is confined by, or that are known mostly as
//! ways into the kernel. Namespaces, ids without privileges outside, and dropped capabilities refuse most of them too: this is
//! the second wall. A filter by list of what is *allowed* would break programs with every new kernel; the
//! kernel's own table of always-allowed calls makes a list of refusals free for the others.
//!
//! `clone3` hides its flags behind a pointer that a filter cannot follow: it is answered with ENOSYS, on which C libraries fall
//! back to `clone`, whose flags are looked at.

use nix::libc;

use crate::sys::Instruction;

const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const JUMP: u16 = 0x05; // BPF_JMP | BPF_JA
const JUMP_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const JUMP_GREATER_EQUAL: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
const JUMP_ANY_BIT: u16 = 0x45; // BPF_JMP | BPF_JSET | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K

/// Offsets in `struct seccomp_data` (linux/seccomp.h).
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENT_0: u32 = 16;
const ARGUMENT_1: u32 = 24;

/// `AUDIT_ARCH_X86_64` (linux/audit.h).
const X86_64: u32 = 0xc000_003e;
/// Numbers from here on are those of the x32 interface.
const X32_BIT: u32 = 0x4000_0000;

const ALLOW: u32 = 0x7fff_0000;
const ERRNO: u32 = 0x0005_0000;
const KILL: u32 = 0x8000_0000;

/// Calls that are refused with EPERM.
const REFUSED: [i64; 64] = [
    // The mount interfaces, old and new.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_mount_setattr,
    SYS_OPEN_TREE_ATTR,
    SYS_STATMOUNT,
    SYS_LISTMOUNT,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    // Other namespaces, other processes' descriptors, files by handle.
    libc::SYS_setns,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    // Keys belong to users, not to namespaces.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // Code in the kernel, and looking into it.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_syslog,
    libc::SYS_lookup_dcookie,
    // Stop the kernel in the middle of a fault: the tool of many exploits.
    libc::SYS_userfaultfd,
    // Its own list of calls, which this filter does not see.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // The machine as a whole.
    libc::SYS_reboot,
    libc::SYS_acct,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_vhangup,
    libc::SYS_nfsservctl,
    libc::SYS_uselib,
    libc::SYS_ustat,
    libc::SYS_sysfs,
    libc::SYS__sysctl,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_vmsplice,
    libc::SYS_remap_file_pages,
    SYS_LSM_SET_SELF_ATTR,
];

/// Newer than the C library's table (include/uapi/asm-generic/unistd.h).
const SYS_STATMOUNT: i64 = 457;
const SYS_LISTMOUNT: i64 = 458;
const SYS_LSM_SET_SELF_ATTR: i64 = 460;
const SYS_OPEN_TREE_ATTR: i64 = 467;

/// Requests of `ioctl` that are refused, whatever they are sent to.
const REFUSED_IOCTLS: [u32; 10] = [
    // Typing into a terminal of somebody else.
    0x5412, // TIOCSTI
    0x541c, // TIOCLINUX
    // Exchanging the blocks of two files behind the file system's checks.
    0xc0c0_586d, // XFS_IOC_SWAPEXT
    0x4028_5881, // XFS_IOC_EXCHANGE_RANGE
    0x8058_5882, // XFS_IOC_START_COMMIT
    0x4058_5883, // XFS_IOC_COMMIT_RANGE
    // Freezing or ending a whole file system.
    0xc004_5877, // FIFREEZE
    0xc004_5878, // FITHAW
    0x8004_587d, // XFS_IOC_GOINGDOWN, EXT4_IOC_SHUTDOWN
    0xc018_5879, // FITRIM
];

/// Families of sockets that are allowed; others reach the host (vsock) or are rarely tested code.
const ALLOWED_FAMILIES: [i32; 4] = [
    libc::AF_UNIX,
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_NETLINK,
];

/// Flags of `clone` and `unshare` that make namespaces.
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | 0x80; // CLONE_NEWTIME

fn number(call: i64) -> u32 {
    u32::try_from(call).expect("system call numbers are small")
}

fn refuse(errno: i32) -> Instruction {
    let errno = u32::try_from(errno).expect("errno values are positive");
    (RETURN, 0, 0, ERRNO | errno)
}

/// What is done about one call: returns in every case. The call's number is in the accumulator before.
type Rule = (u32, Vec<Instruction>);

/// Rules that are looked through one after the other.
const FEW: usize = 3;

/// Finds the rule of a call by halves; a call without one is allowed. The kernel tries every number when a filter is
/// installed, with interrupts off: a chain of all rules cost a tenth of a millisecond a process.
fn look_up(rules: &[Rule]) -> Vec<Instruction> {
    let (lower, upper) = rules.split_at(rules.len() / 2);
    let mut program = Vec::new();
    match upper.first() {
        Some((first, _)) if rules.len() > FEW => {
            let below = look_up(lower);
            let skip = u32::try_from(below.len()).expect("programs are short");
            program.push((JUMP_GREATER_EQUAL, 0, 1, *first));
            program.push((JUMP, 0, 0, skip));
            program.extend(below);
            program.extend(look_up(upper));
        }
        _ => {
            for (call, body) in rules {
                let skip = u8::try_from(body.len()).expect("bodies are short");
                program.push((JUMP_EQUAL, 0, skip, *call));
                program.extend_from_slice(body);
            }
            program.push((RETURN, 0, 0, ALLOW));
        }
    }
    program
}

fn rules() -> Vec<Rule> {
    let mut rules = vec![(number(libc::SYS_clone3), vec![refuse(libc::ENOSYS)])];
    for call in [libc::SYS_clone, libc::SYS_unshare] {
        let body = vec![
            (LOAD, 0, 0, ARGUMENT_0),
            (JUMP_ANY_BIT, 0, 1, NAMESPACES.cast_unsigned()),
            refuse(libc::EPERM),
            (RETURN, 0, 0, ALLOW),
        ];
        rules.push((number(call), body));
    }
    for call in [libc::SYS_socket, libc::SYS_socketpair] {
        let mut body = vec![(LOAD, 0, 0, ARGUMENT_0)];
        for family in ALLOWED_FAMILIES {
            body.push((JUMP_EQUAL, 0, 1, family.cast_unsigned()));
            body.push((RETURN, 0, 0, ALLOW));
        }
        body.push(refuse(libc::EAFNOSUPPORT));
        rules.push((number(call), body));
    }
    // The kernel takes the request as 32 bits: the upper half of the argument says nothing.
    let mut body = vec![(LOAD, 0, 0, ARGUMENT_1)];
    for request in REFUSED_IOCTLS {
        body.push((JUMP_EQUAL, 0, 1, request));
        body.push(refuse(libc::EPERM));
    }
    body.push((RETURN, 0, 0, ALLOW));
    rules.push((number(libc::SYS_ioctl), body));
    let refused = REFUSED.map(|call| (number(call), vec![refuse(libc::EPERM)]));
    rules.extend(refused);
    rules.sort_by_key(|(call, _)| *call);
    rules
}

/// The filter.
pub(crate) fn filter() -> Vec<Instruction> {
    let mut program = vec![
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, X86_64),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_GREATER_EQUAL, 0, 1, X32_BIT),
        refuse(libc::ENOSYS),
    ];
    program.extend(look_up(&rules()));
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would do with a call: the filter, run here.
    fn decide(architecture: u32, call: i64, arguments: [u32; 2]) -> u32 {
        decide_in_steps(architecture, call, arguments).0
    }

    /// And how many instructions it looks at.
    fn decide_in_steps(architecture: u32, call: i64, arguments: [u32; 2]) -> (u32, usize) {
        let program = filter();
        let (mut at, mut accumulator, mut steps) = (0, 0, 0);
        loop {
            steps += 1;
            let (code, yes, no, k) = program[at];
            at += 1;
            let jump = |taken: bool| usize::from(if taken { yes } else { no });
            match code {
                LOAD => {
                    accumulator = match k {
                        NUMBER => number(call),
                        ARCHITECTURE => architecture,
                        ARGUMENT_0 => arguments[0],
                        ARGUMENT_1 => arguments[1],
                        _ => panic!("load of {k}"),
                    }
                }
                JUMP => at += usize::try_from(k).unwrap(),
                JUMP_EQUAL => at += jump(accumulator == k),
                JUMP_GREATER_EQUAL => at += jump(accumulator >= k),
                JUMP_ANY_BIT => at += jump(accumulator & k != 0),
                RETURN => return (k, steps),
                _ => panic!("instruction {code:#x}"),
            }
        }
    }

    fn errno(value: i32) -> u32 {
        ERRNO | u32::try_from(value).unwrap()
    }

    /// The refused calls once more, by the numbers of the kernel's table (arch/x86/entry/syscalls/syscall_64.tbl).
    const NUMBERS: [i64; 64] = [
        165, 166, 155, 430, 431, 432, 433, 428, 429, 442, 467, 457, 458, 179, 443, 167, 168, 308,
        304, 303, 438, 312, 310, 311, 248, 249, 250, 321, 298, 175, 313, 176, 246, 320, 103, 212,
        323, 425, 426, 427, 169, 163, 164, 227, 305, 159, 170, 171, 172, 173, 154, 153, 180, 134,
        136, 139, 156, 300, 301, 256, 279, 278, 216, 460,
    ];
    /// The refused requests once more.
    const IOCTLS: [u32; 10] = [
        0x5412,
        0x541c,
        0xc0c0_586d,
        0x4028_5881,
        0x8058_5882,
        0x4058_5883,
        0xc004_5877,
        0xc004_5878,
        0x8004_587d,
        0xc018_5879,
    ];

    /// Mutations: without the check of `clone`'s flags the first assertion on `unshare` fails; so it does, or the one on `clone`, with
    /// each bit of `NAMESPACES` missing; each entry of a list of refusals replaced by the next one; each family by vsock's.
    #[test]
    fn escapes_are_refused_and_work_is_allowed() {
        let call = |number, arguments| decide(X86_64, number, arguments);
        for allowed in [
            libc::SYS_read,
            libc::SYS_execve,
            libc::SYS_ptrace,
            libc::SYS_chroot,
        ] {
            assert_eq!(call(allowed, [0; 2]), ALLOW, "{allowed}");
        }
        for refused in NUMBERS {
            assert_eq!(call(refused, [0; 2]), errno(libc::EPERM), "{refused}");
        }
        assert_eq!(REFUSED.len(), NUMBERS.len());
        for request in IOCTLS {
            let asked = call(libc::SYS_ioctl, [0, request]);
            assert_eq!(asked, errno(libc::EPERM), "{request:#x}");
        }
        assert_eq!(REFUSED_IOCTLS.len(), IOCTLS.len());
        // CLONE_NEW*: TIME, NS, CGROUP, UTS, IPC, USER, PID, NET.
        for new in [
            0x80,
            0x2_0000,
            0x200_0000,
            0x400_0000,
            0x800_0000,
            0x1000_0000,
            0x2000_0000,
            0x4000_0000,
        ] {
            assert_eq!(call(libc::SYS_unshare, [new, 0]), errno(libc::EPERM));
            let flags = new | libc::SIGCHLD.cast_unsigned();
            assert_eq!(call(libc::SYS_clone, [flags, 0]), errno(libc::EPERM));
        }
        assert_eq!(call(libc::SYS_clone3, [0; 2]), errno(libc::ENOSYS));
        for new in [libc::CLONE_NEWUSER, libc::CLONE_NEWNS, libc::CLONE_NEWNET] {
            let flags = (new | libc::SIGCHLD).cast_unsigned();
            for make in [libc::SYS_clone, libc::SYS_unshare] {
                assert_eq!(call(make, [flags, 0]), errno(libc::EPERM), "{new:#x}");
            }
        }
        let thread = (libc::CLONE_VM | libc::CLONE_THREAD).cast_unsigned();
        assert_eq!(call(libc::SYS_clone, [thread, 0]), ALLOW);
        assert_eq!(call(libc::SYS_ioctl, [0, 0x5412]), errno(libc::EPERM));
        assert_eq!(call(libc::SYS_ioctl, [0, 0xc0c0_586d]), errno(libc::EPERM));
        assert_eq!(call(libc::SYS_ioctl, [0, 0x5413]), ALLOW);
        let family = |family: i32| call(libc::SYS_socket, [family.cast_unsigned(), 0]);
        assert_eq!(family(libc::AF_INET6), ALLOW);
        assert_eq!(family(libc::AF_VSOCK), errno(libc::EAFNOSUPPORT));
        assert_eq!(family(libc::AF_PACKET), errno(libc::EAFNOSUPPORT));
        assert_eq!(
            call(0x4000_0000 | libc::SYS_mount, [0; 2]),
            errno(libc::ENOSYS)
        );
        assert_eq!(decide(0x4000_0003, libc::SYS_read, [0; 2]), KILL);
    }

    /// Every number is refused or allowed as the lists say, with few steps. Mutations: `>` in place of `>=` at the halves (a rule in
    /// the middle is missed); `FEW` of 100 (a chain again: more steps).
    #[test]
    fn every_call_finds_its_rule_in_few_steps() {
        let special = [
            libc::SYS_clone3,
            libc::SYS_clone,
            libc::SYS_unshare,
            libc::SYS_socket,
            libc::SYS_socketpair,
            libc::SYS_ioctl,
        ];
        for call in (0..600).filter(|call| !special.contains(call)) {
            let (decision, steps) = decide_in_steps(X86_64, call, [0; 2]);
            let expected = if REFUSED.contains(&call) {
                errno(libc::EPERM)
            } else {
                ALLOW
            };
            assert_eq!(decision, expected, "{call}");
            assert!(steps <= 24, "{call}: {steps}");
        }
    }
}

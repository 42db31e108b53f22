//! What AWS's refusals mean, and what to do next.

/// A call that AWS, or the CLI on the way there, refused.
#[derive(Debug)]
pub(super) struct Refusal {
    /// What was called, as on the command line: `ec2 run-instances`.
    pub(super) call: String,
    /// AWS's error code; none where the CLI did not get as far as AWS or its answer is lost.
    pub(super) code: Option<String>,
    pub(super) message: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&explain(self))
    }
}

impl std::error::Error for Refusal {}

/// AWS's own message, what it means, and the next step.
fn explain(refusal: &Refusal) -> String {
    let advice = match &refusal.code {
        Some(code) => by_code(code, &refusal.message),
        None => by_text(&refusal.message),
    };
    let code = refusal
        .code
        .as_ref()
        .map(|code| format!("{code}: "))
        .unwrap_or_default();
    let said = format!("aws {} said: {code}{}", refusal.call, refusal.message);
    match advice {
        Some((meaning, next_step)) => format!("{meaning} ({said}); next: {next_step}"),
        None => said,
    }
}

/// Whether another subnet, which is another availability zone, may have what this one has not.
pub(super) fn is_lack_of_capacity(refusal: &Refusal) -> bool {
    matches!(
        refusal.code.as_deref(),
        Some(
            "InsufficientInstanceCapacity"
                | "InsufficientHostCapacity"
                | "InsufficientFreeAddressesInSubnet"
                | "Unsupported"
        )
    )
}

/// Whether it may work when less runs in the account.
pub(super) fn is_lack_of_quota(refusal: &Refusal) -> bool {
    let code = refusal.code.as_deref();
    code.is_some_and(|code| QUOTA_CODES.contains(&code))
}

/// Whether AWS has refused for good. A call that broke off, or broke on AWS's side, may have been
/// carried out.
pub(super) fn nothing_was_done(refusal: &Refusal) -> bool {
    let broke_off = [
        "InternalError",
        "InternalFailure",
        "RequestTimeout",
        "ServiceUnavailable",
        "Unavailable",
    ];
    refusal
        .code
        .as_deref()
        .is_some_and(|code| !broke_off.contains(&code))
}

const FOUNDATION: &str = "run `cargo xtask tf apply staging`, or name another parameter with --foundation (docs/terraform.md)";

const SIGN_IN: &str = "sign in again (`aws sso login`, or new keys), see who you are with `aws sts get-caller-identity`, and repeat the command";

const CAPACITY: &str = "try again later, in another region (--region) or subnet (--subnet), with another --instance-type of the family, or reserve capacity and name it with --capacity-reservation";

const QUOTA: &str = "ask for more under Service Quotas, Amazon EC2, in this region: `Running On-Demand G and VT instances` for g types, `Running On-Demand P instances` for p types, and `All … Spot Instance Requests` with --spot; they count vCPUs";

/// What refusals of one kind mean.
struct Advice {
    codes: &'static [&'static str],
    /// The code has this meaning only with this message of AWS.
    says: Option<&'static str>,
    meaning: &'static str,
    next_step: &'static str,
}

const fn advice(
    codes: &'static [&'static str],
    meaning: &'static str,
    next_step: &'static str,
) -> Advice {
    Advice {
        codes,
        says: None,
        meaning,
        next_step,
    }
}

/// Codes that count what runs at the same time.
const QUOTA_CODES: &[&str] = &[
    "VcpuLimitExceeded",
    "InstanceLimitExceeded",
    "MaxSpotInstanceCountExceeded",
];

/// The first that fits counts. Codes from the list of EC2's API error codes, and from those of
/// Systems Manager and STS.
const ADVICE: &[Advice] = &[
    advice(
        QUOTA_CODES,
        "this account's quota does not allow another instance of this type",
        QUOTA,
    ),
    advice(
        &["InsufficientInstanceCapacity", "InsufficientHostCapacity"],
        "AWS has no such instance free there at the moment",
        CAPACITY,
    ),
    advice(
        &["InsufficientFreeAddressesInSubnet"],
        "the subnet has no address free",
        "wait until something in it has ended, or give another --subnet",
    ),
    advice(
        &["Unsupported"],
        "this instance type is not offered there, or not in this form",
        "give a --subnet of another availability zone; `aws ec2 describe-instance-type-offerings --location-type availability-zone` lists where a type is offered",
    ),
    advice(
        &["ReservationCapacityExceeded"],
        "the capacity reservation is used up",
        "wait until an instance in it has ended, or leave --capacity-reservation out",
    ),
    advice(
        &["SpotMaxPriceTooLow"],
        "spot capacity costs more than on demand there",
        "leave --spot out",
    ),
    advice(
        &[
            "InvalidCapacityReservationId.NotFound",
            "InvalidCapacityReservationId.Malformed",
        ],
        "there is no such capacity reservation in this region",
        "compare --capacity-reservation with `aws ec2 describe-capacity-reservations`",
    ),
    advice(
        &[
            "UnauthorizedOperation",
            "AccessDenied",
            "AccessDeniedException",
        ],
        "you are signed in, but not allowed to do this",
        "have the policy attached that `terraform output launcher_policy_arn` names; an encoded message is read with `aws sts decode-authorization-message`",
    ),
    advice(
        &[
            "InvalidAMIID.NotFound",
            "InvalidAMIID.Malformed",
            "InvalidAMIID.Unavailable",
        ],
        "there is no such AMI in this region, or it is not shared with this account",
        "compare --ami and --region with the manifest of the build (docs/ami.md)",
    ),
    advice(
        &[
            "InvalidSubnetID.NotFound",
            "InvalidSubnet",
            "InvalidGroup.NotFound",
        ],
        "subnet or security group is gone, or in another region",
        FOUNDATION,
    ),
    Advice {
        says: Some("IAM Instance Profile"),
        ..advice(
            &["InvalidParameterValue"],
            "the role for the instance is missing",
            FOUNDATION,
        )
    },
    Advice {
        says: Some("InstanceType"),
        ..advice(
            &["InvalidParameterValue"],
            "there is no such instance type",
            "compare --instance-type with `aws ec2 describe-instance-types`",
        )
    },
    Advice {
        says: Some("architecture"),
        ..advice(
            &[
                "InvalidParameterValue",
                "InvalidParameterCombination",
                "InvalidRequest",
            ],
            "the image is not for the processor of this instance type",
            "choose an --instance-type of the image's architecture",
        )
    },
    advice(
        &["ParameterNotFound"],
        "this account and region has not been prepared for validating AMIs",
        FOUNDATION,
    ),
    advice(
        &[
            "ExpiredToken",
            "ExpiredTokenException",
            "RequestExpired",
            "InvalidClientTokenId",
            "UnrecognizedClientException",
            "AuthFailure",
        ],
        "your AWS credentials are no longer, or not, valid",
        SIGN_IN,
    ),
    advice(
        &["SignatureDoesNotMatch"],
        "AWS does not accept the signature: a wrong secret key, or this machine's clock is wrong",
        SIGN_IN,
    ),
    Advice {
        says: Some("Marketplace"),
        ..advice(
            &["OptInRequired"],
            "the image is made of a product of AWS Marketplace that this account has not subscribed to",
            "subscribe at the address in AWS's message, or bake from another source image",
        )
    },
    advice(
        &["OptInRequired", "PendingVerification"],
        "this account may not use the service or region yet",
        "enable the region under Account, AWS Regions; a new account is verified within hours",
    ),
    advice(
        &["Blocked"],
        "AWS has blocked this account",
        "answer AWS's mail to the account's owner, or open a case with AWS Support",
    ),
    advice(
        &["RequestLimitExceeded", "Throttling", "ThrottlingException"],
        "too many calls to AWS from this account at once",
        "repeat the command in a minute",
    ),
];

fn by_code(code: &str, message: &str) -> Option<(&'static str, &'static str)> {
    let fits = |it: &&Advice| {
        it.codes.contains(&code) && it.says.is_none_or(|part| message.contains(part))
    };
    let advice = ADVICE.iter().find(fits)?;
    Some((advice.meaning, advice.next_step))
}

/// Messages of the CLI itself, before or without a request to AWS.
fn by_text(message: &str) -> Option<(&'static str, &'static str)> {
    let says = |part: &str| message.contains(part);
    Some(if says("Unable to locate credentials") {
        (
            "there are no AWS credentials here",
            "sign in (`aws sso login`, `aws configure`, or AWS_PROFILE), see who you are with `aws sts get-caller-identity`, and repeat the command",
        )
    } else if says("config profile") && says("could not be found") {
        (
            "there is no such profile",
            "set AWS_PROFILE to one of `aws configure list-profiles`",
        )
    } else if says("You must specify a region") {
        ("no region is chosen", "give --region, or set AWS_REGION")
    } else if says("SSO") && (says("expired") || says("invalid") || says("does not exist"))
        || says("Token has expired")
        || says("token has expired")
    {
        ("your AWS session has expired", SIGN_IN)
    } else if says("Could not connect to the endpoint URL") || says("Connect timeout") {
        (
            "AWS could not be reached",
            "check the network, and that --region names a region that exists",
        )
    } else {
        return None;
    })
}

#[cfg(test)]
mod tests {
    use super::{
        ADVICE, Refusal, explain, is_lack_of_capacity, is_lack_of_quota, nothing_was_done,
    };

    fn refusal(code: Option<&str>, message: &str) -> Refusal {
        Refusal {
            call: "ec2 run-instances".to_owned(),
            code: code.map(str::to_owned),
            message: message.to_owned(),
        }
    }

    #[test]
    fn every_known_refusal_keeps_what_aws_said_and_says_the_next_step() {
        let cases = [
            (
                Some("VcpuLimitExceeded"),
                "You have requested more vCPU capacity than your current vCPU limit of 0 allows for the instance bucket that the specified instance type belongs to.",
                "`Running On-Demand P instances` for p types",
            ),
            (
                Some("InstanceLimitExceeded"),
                "You have requested more instances (1) than your current instance limit of 0 allows for the specified instance type.",
                "Service Quotas, Amazon EC2, in this region",
            ),
            (
                Some("MaxSpotInstanceCountExceeded"),
                "Max spot instance count exceeded",
                "`All … Spot Instance Requests` with --spot",
            ),
            (
                Some("InsufficientInstanceCapacity"),
                "We currently do not have sufficient p5.48xlarge capacity in the Availability Zone you requested (eu-central-1a).",
                "--capacity-reservation",
            ),
            (
                Some("InsufficientHostCapacity"),
                "Insufficient capacity.",
                "in another region (--region)",
            ),
            (
                Some("InsufficientFreeAddressesInSubnet"),
                "There are not enough free addresses in subnet 'subnet-1' to satisfy the requested number of instances.",
                "give another --subnet",
            ),
            (
                Some("Unsupported"),
                "Your requested instance type (p5.48xlarge) is not supported in your requested Availability Zone (eu-central-1c).",
                "describe-instance-type-offerings",
            ),
            (
                Some("ReservationCapacityExceeded"),
                "The requested reservation does not have sufficient compatible and available capacity for this request.",
                "leave --capacity-reservation out",
            ),
            (
                Some("SpotMaxPriceTooLow"),
                "Your Spot request price of 0.1 is lower than the minimum required Spot request fulfillment price of 0.4.",
                "leave --spot out",
            ),
            (
                Some("InvalidCapacityReservationId.NotFound"),
                "The capacity reservation ID 'cr-1' does not exist",
                "describe-capacity-reservations",
            ),
            (
                Some("InvalidCapacityReservationId.Malformed"),
                "The ID 'cr-1' is malformed",
                "describe-capacity-reservations",
            ),
            (
                Some("UnauthorizedOperation"),
                "You are not authorized to perform this operation. Encoded authorization failure message: abc",
                "decode-authorization-message",
            ),
            (
                Some("AccessDenied"),
                "User: arn:aws:iam::111122223333:user/ci is not authorized to perform: iam:PassRole",
                "launcher_policy_arn",
            ),
            (
                Some("AccessDeniedException"),
                "User: arn:aws:iam::111122223333:user/ci is not authorized to perform: ssm:GetParameter",
                "launcher_policy_arn",
            ),
            (
                Some("InvalidAMIID.NotFound"),
                "The image id '[ami-1]' does not exist",
                "compare --ami and --region",
            ),
            (
                Some("InvalidAMIID.Malformed"),
                "Invalid id: \"ami-1\"",
                "compare --ami and --region",
            ),
            (
                Some("InvalidAMIID.Unavailable"),
                "The image ID 'ami-1' is unavailable",
                "compare --ami and --region",
            ),
            (
                Some("InvalidSubnetID.NotFound"),
                "The subnet ID 'subnet-1' does not exist",
                "cargo xtask tf apply staging",
            ),
            (
                Some("InvalidSubnet"),
                "No default subnet for availability zone: 'eu-central-1a'.",
                "--foundation",
            ),
            (
                Some("InvalidGroup.NotFound"),
                "The security group 'sg-1' does not exist in VPC 'vpc-1'",
                "--foundation",
            ),
            (
                Some("InvalidParameterValue"),
                "Value (x) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name",
                "cargo xtask tf apply staging",
            ),
            (
                Some("InvalidParameterValue"),
                "Invalid value 'g9.xlarge' for InstanceType.",
                "describe-instance-types",
            ),
            (
                Some("InvalidParameterValue"),
                "The architecture 'arm64' of the specified instance type does not match the architecture 'x86_64' of the specified AMI.",
                "the image's architecture",
            ),
            (
                Some("InvalidParameterCombination"),
                "The instance type's architecture does not match.",
                "the image's architecture",
            ),
            (
                Some("InvalidRequest"),
                "The requested architecture does not match.",
                "the image's architecture",
            ),
            (
                Some("ParameterNotFound"),
                "Parameter /x not found.",
                "cargo xtask tf apply staging",
            ),
            (
                Some("ExpiredToken"),
                "The security token included in the request is expired",
                "aws sso login",
            ),
            (
                Some("ExpiredTokenException"),
                "The security token included in the request is expired",
                "aws sso login",
            ),
            (
                Some("RequestExpired"),
                "Request has expired.",
                "aws sso login",
            ),
            (
                Some("InvalidClientTokenId"),
                "The security token included in the request is invalid.",
                "aws sts get-caller-identity",
            ),
            (
                Some("UnrecognizedClientException"),
                "The security token included in the request is invalid.",
                "aws sts get-caller-identity",
            ),
            (
                Some("AuthFailure"),
                "AWS was not able to validate the provided access credentials",
                "aws sts get-caller-identity",
            ),
            (
                Some("SignatureDoesNotMatch"),
                "The request signature we calculated does not match the signature you provided.",
                "aws sts get-caller-identity",
            ),
            (
                Some("OptInRequired"),
                "In order to use this AWS Marketplace product you need to accept terms and subscribe.",
                "subscribe at the address",
            ),
            (
                Some("OptInRequired"),
                "You are not subscribed to this service.",
                "enable the region",
            ),
            (
                Some("PendingVerification"),
                "Your request for accessing resources in this region is being validated",
                "verified within hours",
            ),
            (
                Some("Blocked"),
                "This account is currently blocked and not recognized as a valid account.",
                "AWS Support",
            ),
            (
                Some("RequestLimitExceeded"),
                "Request limit exceeded.",
                "in a minute",
            ),
            (Some("Throttling"), "Rate exceeded", "in a minute"),
            (Some("ThrottlingException"), "Rate exceeded", "in a minute"),
            (
                None,
                "Unable to locate credentials. You can configure credentials by running \"aws configure\".",
                "aws sts get-caller-identity",
            ),
            (
                None,
                "The config profile (gone) could not be found",
                "list-profiles",
            ),
            (
                None,
                "You must specify a region. You can also configure your region by running \"aws configure\".",
                "--region",
            ),
            (
                None,
                "Error when retrieving token from sso: Token has expired and refresh failed",
                "aws sso login",
            ),
            (
                None,
                "The SSO session associated with this profile has expired or is otherwise invalid.",
                "aws sso login",
            ),
            (
                None,
                "Could not connect to the endpoint URL: \"https://ec2.eu-nowhere-1.amazonaws.com/\"",
                "--region",
            ),
        ];
        for (code, message, next_step) in cases {
            let text = explain(&refusal(code, message));
            let (before, after) = text.split_once("; next: ").expect(message);
            assert!(after.contains(next_step), "{text}");
            assert!(before.contains(message), "{text}");
        }
        let known = ADVICE.iter().flat_map(|it| it.codes);
        for code in known {
            let is_tried = cases.iter().any(|(tried, ..)| *tried == Some(*code));
            assert!(is_tried, "{code} has no case");
        }
    }

    #[test]
    fn an_unknown_refusal_is_told_as_it_is() {
        assert_eq!(
            explain(&refusal(Some("Novel"), "something new")),
            "aws ec2 run-instances said: Novel: something new"
        );
    }

    #[test]
    fn only_a_clear_refusal_means_that_nothing_was_launched() {
        assert!(nothing_was_done(&refusal(Some("VcpuLimitExceeded"), "")));
        assert!(!nothing_was_done(&refusal(Some("InternalError"), "")));
        assert!(!nothing_was_done(&refusal(
            None,
            "Read timeout on endpoint URL"
        )));
    }

    #[test]
    fn another_zone_is_tried_only_for_lack_of_capacity() {
        assert!(is_lack_of_capacity(&refusal(
            Some("InsufficientInstanceCapacity"),
            ""
        )));
        assert!(!is_lack_of_capacity(&refusal(
            Some("VcpuLimitExceeded"),
            ""
        )));
        assert!(!is_lack_of_capacity(&refusal(None, "")));
        assert!(is_lack_of_quota(&refusal(Some("VcpuLimitExceeded"), "")));
        assert!(!is_lack_of_quota(&refusal(
            Some("InsufficientInstanceCapacity"),
            ""
        )));
    }
}
